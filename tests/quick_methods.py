"""Settings that make a method fast on the toy task. A new method adds its line, or needs none."""

CANVAS = ["method.canvas.per_class=1", "method.class_size=[20]", "method.batch=8"]
SERVER = ["method.server.recipe.steps=3", "method.server.recipe.width=4"]
ONCE = ["privacy.epsilon=inf", "method.epochs=2", "method.recipe.width=4"]
GENERATED = [
    *("method.generate.epochs=2", "method.generate.steps=2", "method.generate.batch=8"),
    *("method.generate.width=4", "method.distil.batch=8"),
]
UPLOADS = ["privacy.epsilon=inf", "method.recipe.steps=3", "method.recipe.width=4"]
ONE_NETWORK = ["privacy.epsilon=inf", "method.batch=2", "method.iterations=2"]
QUICK = {
    "anis": [*CANVAS, *SERVER, "method.rounds=2", "method.width=2"],
    "dm": ["method.canvas.per_class=1", *SERVER, "method.steps=2", "privacy.epsilon=inf"],
    "ndpdc": [*CANVAS, *SERVER, "method.rounds=2", "method.width=2"],
    "ppfl_dc": [*CANVAS, *SERVER, "method.rounds=2", "method.width=2"],
    "feddm": [*CANVAS, *SERVER, "method.rounds=2", "method.steps=1"],
    "fedavg": ["privacy.epsilon=inf", "method.rounds=2", "method.recipe.width=4"],
    "dp_fedavg": ["method.rounds=2", "method.recipe.width=4"],
    "fedprox": ["privacy.epsilon=inf", "method.rounds=2", "method.recipe.width=4"],
    "fedadam": ["privacy.epsilon=inf", "method.rounds=2", "method.recipe.width=4"],
    "scaffold": ["privacy.epsilon=inf", "method.rounds=2", "method.recipe.width=4"],
    "sfl": [
        "privacy.epsilon=inf",
        "method.recipe.steps=2",
        "method.recipe.batch=8",
        "method.recipe.width=4",
    ],
    "collab_dm": [
        *SERVER,
        "method.canvas.per_class=1",
        "method.nets=2",
        "method.width=4",
        "method.matching.steps=2",
    ],
    "fedsumup": [
        "privacy.epsilon=inf",
        "method.side=4",
        "method.rounds=2",
        "method.recipe.steps=3",
        "method.recipe.width=4",
        "method.improve.steps=2",
    ],
    "downsample": [
        "privacy.epsilon=inf",
        "method.side=4",
        "method.recipe.steps=3",
        "method.recipe.width=4",
    ],
    "dp_pix": [*UPLOADS, "method.cell=2", "method.neighbourhood=4"],
    "ldp_slicing": [*UPLOADS, "method.side=4"],
    "deepfixcx": [*UPLOADS, "method.levels=1", "method.patches=2"],
    "oneshot_fedavg": ONCE,
    "ensemble": ONCE,
    "feddf": [*ONCE, "method.images=20", "method.distil.steps=3"],
    "dense": [*ONCE, *GENERATED],
    "co_boosting": [*ONCE, *GENERATED],
    "dp_glow": [*UPLOADS, "method.side=4"],
    "fedsd2c": [
        *UPLOADS,
        *("method.encoder=pca", "method.local.width=4", "method.epochs=1"),
        *("method.keep=2", "method.crops=1", "method.steps=1"),
    ],
    "fedcvae": [
        *UPLOADS,
        *("method.heads=['ens','kd']", "method.latent=2", "method.width=4"),
        *("method.epochs=1", "method.images=20", "method.distil_epochs=1"),
    ],
    "fedcgs": ["method.features=scattering:32"],
    "fed3r": ["method.features=scattering:32"],
    "dosfl": [*ONE_NETWORK, "method.steps=2", "method.model=mlp", "method.width=8"],
    "fedd3": ["privacy.epsilon=inf", "method.canvas.per_class=2", *SERVER, "method.steps=2"],
    "fedsynth": [
        *ONE_NETWORK,
        "method.rounds=2",
        "method.steps=2",
        "method.recipe.model=mlp",
        "method.recipe.width=8",
    ],
    "logistic": ["method.features=scattering:32", "method.steps=2"],
    "fedkt_csd": [
        "method.features=scattering:32",
        "method.heads=['lda','qda','decode','match']",
        "method.nets=2",
        "method.net_width=4",
        "method.matching.steps=2",
        "method.synthetic_size=30",
        "method.recipe.steps=3",
        "method.recipe.width=4",
        "method.recipe.batch=16",
    ],
}
