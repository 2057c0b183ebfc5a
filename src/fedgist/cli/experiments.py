"""Commands for one machine: simulate, plan, evaluate, encoders."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import typer

from fedgist.cli.common import AsJson, Bars, Debug, Out, Sets, group, guarded, show

__all__ = ["add_experiments"]

Config = Annotated[Path | None, typer.Argument(help="TOML file; all keys have defaults.")]
Data = Annotated[str | None, typer.Option("--data", help="Named set, file or folder.")]
MethodName = Annotated[str | None, typer.Option("--method", help="Name, or a dotted module.")]
Clients = Annotated[int | None, typer.Option("--clients", help="How many clients to simulate.")]
Split = Annotated[
    str | None, typer.Option("--partition", help="iid, dirichlet:0.5, pathological:2, natural ...")
]
Epsilon = Annotated[float | None, typer.Option("--epsilon", help="Privacy ε; inf for none.")]
Heads = Annotated[
    list[str] | None, typer.Option("--head", help="lda, qda, ridge, decode, match; repeat.")
]
Seed = Annotated[int | None, typer.Option("--seed", help="Seed of the whole run.")]


def add_experiments(app: typer.Typer) -> None:
    """Register the commands of this file."""
    app.command()(run)
    app.command()(plan)
    app.command()(evaluate)
    encoders = group("Frozen public encoders.")
    encoders.command("list")(encoder_list)
    encoders.command("info")(encoder_info)
    encoders.command("train")(encoder_train)
    app.add_typer(encoders, name="encoder")


def run(
    config: Config = None,
    data: Data = None,
    method: MethodName = None,
    clients: Clients = None,
    partition: Split = None,
    epsilon: Epsilon = None,
    head: Heads = None,
    seed: Seed = None,
    set_: Sets = None,
    out: Out = Path("fedgist-out"),
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Simulate a federation on one machine, end to end, and write everything to a folder."""

    def body() -> None:
        from fedgist.config import load
        from fedgist.experiment import execute
        from fedgist.summary import print_result

        resolved = load(config, _sets(data, method, clients, partition, epsilon, head, seed, set_))
        with Bars() as tell:
            result = execute(resolved, out, tell)
        if as_json:
            from fedgist.report.record import to_json

            print(to_json(result.report))
        else:
            print_result(result.report, out)

    guarded(body, debug)


def plan(
    config: Config = None,
    data: Data = None,
    method: MethodName = None,
    clients: Clients = None,
    partition: Split = None,
    epsilon: Epsilon = None,
    head: Heads = None,
    seed: Seed = None,
    set_: Sets = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Show rounds, ε, noise, bytes and expected signal before any image is read."""

    def body() -> None:
        from fedgist.config import load
        from fedgist.experiment import plan_record
        from fedgist.summary import print_plan

        resolved = load(config, _sets(data, method, clients, partition, epsilon, head, seed, set_))
        record = plan_record(resolved)
        show(record, as_json, print_plan)

    guarded(body, debug)


def evaluate(
    folder: Annotated[Path, typer.Argument(help="A folder that `fedgist run` wrote.")],
    test: Annotated[str, typer.Option("--test", help="Named set, file or folder of real images.")],
    split: Annotated[str, typer.Option("--split", help="Which split of it.")] = "test",
    utility: Annotated[
        bool, typer.Option("--utility", help="Also train on the synthetic images; minutes.")
    ] = False,
    train: Annotated[
        str | None, typer.Option("--train", help="Real images to train on for comparison.")
    ] = None,
    model: Annotated[
        list[str] | None,
        typer.Option("--model", help="convnet3, mlp, logistic, knn, linear; repeat."),
    ] = None,
    seeds: Annotated[
        int | None, typer.Option("--seeds", min=1, help="How often a network is trained.")
    ] = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Score the classifiers of a finished run on other real images, or all that it is good for."""

    def body() -> None:
        if utility:
            from fedgist.utility_print import print_utility

            show(_utility(folder, test, split, train, model, seeds), as_json, print_utility)
            return
        from fedgist.errors import ConfigError
        from fedgist.evaluation import evaluate_folder
        from fedgist.summary import print_scores

        given = {"--train": train, "--model": model, "--seeds": seeds}
        if extra := [name for name, value in given.items() if value]:
            raise ConfigError(f"{extra[0]} must come with --utility. Got it alone")
        show(evaluate_folder(folder, test, split), as_json, print_scores)

    guarded(body, debug)


def _utility(
    folder: Path,
    test: str,
    split: str,
    train: str | None,
    models: list[str] | None,
    seeds: int | None,
) -> dict[str, Any]:
    from fedgist.train.tstr import TSTR_MODELS
    from fedgist.utility import evaluate_utility

    names = tuple(models or TSTR_MODELS)
    with Bars() as tell:
        return evaluate_utility(
            folder, test, split, models=names, seeds=seeds or 1, train=train, progress=tell
        )


def encoder_list(as_json: AsJson = False, debug: Debug = False) -> None:
    """List the encoders that ship with FedGist or that it can load."""

    def body() -> None:
        from fedgist.encoders import encoder_names
        from fedgist.summary import print_names

        show(encoder_names(), as_json, print_names)

    guarded(body, debug)


def encoder_info(
    name: Annotated[str, typer.Argument(help="Name, file or folder of an encoder.")],
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Show an encoder's hash, sizes, sources, licences and quality."""

    def body() -> None:
        from fedgist.encoders import encoder_info as info
        from fedgist.summary import print_record

        show(info(name), as_json, print_record)

    guarded(body, debug)


def encoder_train(
    images: Annotated[Path, typer.Argument(help="Images: a folder, or .npy [n,3,64,64].")],
    out: Annotated[Path, typer.Option("--out", help="The .safetensors file to write.")],
    shown: Annotated[int, typer.Option("--shown", help="Images shown in all.")] = 300_000,
    held_out: Annotated[float, typer.Option("--held-out", help="Share that is measured.")] = 0.05,
    seed: Annotated[int, typer.Option("--seed", help="Seed of the training.")] = 0,
    private: Annotated[
        bool,
        typer.Option("--private", help="The images are not public: sites refuse it by default."),
    ] = False,
    debug: Debug = False,
) -> None:
    """Train a codec on images of your own, public ones. Stopped, it goes on where it was."""

    def body() -> None:
        from fedgist.encoders.make import train_own

        def note(images: int, db: float) -> None:
            print(f"{images:>9,} of {shown:,} images, {db:.2f} dB", file=sys.stderr)

        codec = train_own(
            images, out, shown=shown, held_out=held_out, seed=seed, log=note, private=private
        )
        print(f"Written to {out} ({codec.digest[:12]}); use it with --set method.encoder={out}")

    guarded(body, debug)


def _sets(
    data: str | None,
    method: str | None,
    clients: int | None,
    partition: str | None,
    epsilon: float | None,
    heads: list[str] | None,
    seed: int | None,
    sets: Iterable[str] | None,
) -> list[str]:
    """Spell options as settings, so that there is one way to configure a run."""
    out = []
    for key, value in (
        ("data.source", data),
        ("method.name", method),
        ("data.clients", clients),
        ("data.partition", partition),
        ("privacy.epsilon", epsilon),
        ("method.heads", heads or None),
        ("seed", seed),
    ):
        if value is not None:
            out.append(f"{key}={json.dumps(value) if isinstance(value, str | list) else value}")
    return out + list(sets or ())
