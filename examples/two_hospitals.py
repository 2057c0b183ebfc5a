"""Two hospitals and a coordinator with real keys and a shared folder, in one script.

Each would run on a machine of its own; here they are threads. Noise is real: each hospital adds all
of it (trust ``local``), because of two noise shares each could subtract its own.

Usage: python examples/two_hospitals.py
"""

import tempfile
from pathlib import Path
from threading import Thread

from fedgist.exchange.mailbox import join
from fedgist.federation import new_task, open_ledger, open_site, serve_mailbox
from fedgist.privacy.identity import keys_new

TERMS = [
    "task.name=clothes",
    "privacy.epsilon=8",
    "privacy.trust=local",
    "method.heads=['lda']",
    "method.features=scattering:64",
]
DATA = {"north": "fashion-mini@1/6", "south": "fashion-mini@2/6"}


def main(root: Path) -> None:
    """Make keys and a task, let both sites answer, and print what came out."""
    for name in ("lead", *DATA):
        keys_new(root / name, name)
    public = {name: root / name / f"{name}.pub" for name in ("lead", *DATA)}
    task, share = root / "task.toml", root / "share"
    share.mkdir()
    said = new_task(None, public["lead"], [public[n] for n in DATA], DATA["north"], TERMS, task)
    print(f"task {said['hash'][:16]}: {said['claim']['line']}")

    running = [Thread(target=site, args=(root, name, task, share), daemon=True) for name in DATA]
    for thread in running:
        thread.start()
    lead, out = root / "lead" / "lead.key", root / "result"
    report = serve_mailbox(task, lead, share, out, state=root / "lead", test="fashion-mini")
    for thread in running:
        thread.join()
    print(f"lda: {report['heads']['lda']['accuracy']:.3f} on real test images")
    for name in DATA:
        print(f"{name}: {open_ledger(root / name / 'ledger.sqlite').show()['line']}")


def site(root: Path, name: str, task: Path, share: Path) -> None:
    """Be one hospital, from its own key, images and ledger."""
    home = root / name
    key, ledger = home / f"{name}.key", home / "ledger.sqlite"
    one = open_site(task, key, DATA[name], state=home, ledger=ledger)
    join(one, share, say=lambda line: print(f"{name}: {line}"))
    one.close()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        main(Path(name))
