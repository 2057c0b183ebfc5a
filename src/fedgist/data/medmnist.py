"""Class names of the MedMNIST 2D sets, which their npz files do not carry.

Source: ``medmnist.INFO`` of medmnist 3.0.2 (2D sets; https://medmnist.com). Names that hold commas
are reworded without.
"""

from __future__ import annotations

__all__ = ["findings_of", "labels_of"]

_ORGANS = (
    "bladder, femur-left, femur-right, heart, kidney-left, kidney-right, liver, lung-left, "
    "lung-right, pancreas, spleen"
)
_LABELS = {
    "pathmnist": "adipose, background, debris, lymphocytes, mucus, smooth muscle, normal colon "
    "mucosa, cancer-associated stroma, colorectal adenocarcinoma epithelium",
    "dermamnist": "actinic keratoses and intraepithelial carcinoma, basal cell carcinoma, benign "
    "keratosis-like lesions, dermatofibroma, melanoma, melanocytic nevi, vascular lesions",
    "octmnist": "choroidal neovascularization, diabetic macular edema, drusen, normal",
    "pneumoniamnist": "normal, pneumonia",
    "retinamnist": "0, 1, 2, 3, 4",
    "breastmnist": "malignant, normal or benign",
    "bloodmnist": "basophil, eosinophil, erythroblast, immature granulocytes, lymphocyte, "
    "monocyte, neutrophil, platelet",
    "tissuemnist": "collecting duct or connecting tubule, distal convoluted tubule, glomerular "
    "endothelial cells, interstitial endothelial cells, leukocytes, podocytes, proximal tubule "
    "segments, thick ascending limb",
    "organamnist": _ORGANS,
    "organcmnist": _ORGANS,
    "organsmnist": _ORGANS,
}

_FINDINGS = {
    "chestmnist": "atelectasis, cardiomegaly, effusion, infiltration, mass, nodule, pneumonia, "
    "pneumothorax, consolidation, edema, emphysema, fibrosis, pleural, hernia",
}


def labels_of(name: str) -> tuple[str, ...]:
    """Return the class names of a MedMNIST file's stem such as ``bloodmnist_64``, or ()."""
    return _named(_LABELS, name)


def findings_of(name: str) -> tuple[str, ...]:
    """Return what the columns of a multi-label MedMNIST file stand for, or ()."""
    return _named(_FINDINGS, name)


def _named(lists: dict[str, str], name: str) -> tuple[str, ...]:
    text = lists.get(name.lower().partition("_")[0], "")
    return tuple(text.split(", ")) if text else ()
