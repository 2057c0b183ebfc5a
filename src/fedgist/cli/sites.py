"""Commands for real federations: keys, task, contribute and combine, serve and join, ledger."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from fedgist.cli.common import AsJson, Bars, Debug, Out, Sets, group, guarded, show
from fedgist.cli.inspect import inspect

__all__ = ["add_sites"]

TaskFile = Annotated[Path, typer.Option("--task", help="The task file that all sites agreed on.")]
Key = Annotated[Path, typer.Option("--key", help="Your private key, NAME.key.")]
Mailbox = Annotated[Path, typer.Option("--mailbox", help="The folder that all can read and write.")]
Policy = Annotated[
    Path | None, typer.Option("--policy", help="What this site allows; careful without.")
]
LedgerFile = Annotated[
    Path | None, typer.Option("--ledger", help="Default: ~/.fedgist/ledger.sqlite.")
]
State = Annotated[
    Path | None, typer.Option("--state", help="Where it remembers; default in ~/.fedgist.")
]
Reviewed = Annotated[
    bool, typer.Option("--review", help="Send nothing before you have looked: fedgist inspect.")
]
Test = Annotated[
    str | None, typer.Option("--test", help="Real images of your own to measure the result on.")
]


def add_sites(app: typer.Typer) -> None:
    """Register the commands of this file."""
    keys = group("Keys: who is who.")
    keys.command("new")(keys_new)
    keys.command("show")(keys_show)
    app.add_typer(keys, name="keys")
    task = group("The task file: what all sites agree on.")
    task.command("new")(task_new)
    task.command("show")(task_show)
    app.add_typer(task, name="task")
    app.command()(contribute)
    app.command()(combine)
    app.command()(serve)
    app.command()(join)
    app.command()(inspect)
    ledger = group("The ledger: what your data have already spent.")
    ledger.command("show")(ledger_show)
    ledger.command("export")(ledger_export)
    ledger.command("cap")(ledger_cap)
    app.add_typer(ledger, name="ledger")
    app.command()(doctor)


def keys_new(
    name: Annotated[str, typer.Argument(help="Your name in every task: letters, digits, . _ -")],
    out: Annotated[Path, typer.Option("--out", help="Folder for the two files.")] = Path("."),
    debug: Debug = False,
) -> None:
    """Make keys: NAME.key stays with you (mode 600), NAME.pub goes to the coordinator."""

    def body() -> None:
        from fedgist.privacy.identity import Identity, keys_new

        private, public = keys_new(out, name)
        print(f"{private}  keep it: whoever has it can answer in your name")
        print(f"{public}  give it to the coordinator")
        print(
            f"fingerprint {Identity.load(private).public.fingerprint}  read it to them by telephone"
        )

    guarded(body, debug)


def keys_show(
    key: Annotated[Path, typer.Argument(help="A .pub or .key file.")],
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Show the name, the public key and the fingerprint of a key file."""

    def body() -> None:
        from fedgist.federation import read_public
        from fedgist.summary import print_record

        public = read_public(key)
        record = {"name": public.name, "public": public.text(), "fingerprint": public.fingerprint}
        show(record, as_json, print_record)

    guarded(body, debug)


def task_new(
    config: Annotated[Path | None, typer.Argument(help="TOML with method and privacy.")] = None,
    coordinator: Annotated[
        Path, typer.Option("--coordinator", help="The coordinator's .pub file.")
    ] = Path("coordinator.pub"),
    site: Annotated[
        list[Path] | None, typer.Option("--site", help="A site's .pub file; repeat, in order.")
    ] = None,
    like: Annotated[
        str | None, typer.Option("--like", help="Images to take classes and sizes from.")
    ] = None,
    set_: Sets = None,
    out: Annotated[Path, typer.Option("--out", help="The file to write.")] = Path("task.toml"),
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Write the task file: classes, encoder hashes, method, ε, roster, deadline, quorum.

    Without settings the noise is real and each site adds its share inside a secure sum. Terms of
    the exchange: --set exchange.deadline=..., exchange.patience, exchange.quorum,
    exchange.threshold.
    """

    def body() -> None:
        from fedgist.federation import new_task
        from fedgist.summary import print_task

        agreement = new_task(config, coordinator, site or [], like, set_ or [], out)
        show(agreement, as_json, print_task)
        print(
            f"Written to {out}. Every site reads the hash aloud before it joins.", file=sys.stderr
        )

    guarded(body, debug)


def task_show(
    task: Annotated[Path, typer.Argument(help="A task file.")],
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Show what a task asks of a site: its hash, ε, rounds, bytes, roster and terms."""

    def body() -> None:
        from fedgist.agreement import Agreement
        from fedgist.federation import task_record
        from fedgist.summary import print_task

        show(task_record(Agreement.load(task)), as_json, print_task)

    guarded(body, debug)


def contribute(
    data: Annotated[str, typer.Argument(help="This site's images.")],
    task: TaskFile,
    key: Key,
    out: Annotated[Path, typer.Option("--out", help="The gist file to write.")],
    policy: Policy = None,
    ledger: LedgerFile = None,
    state: State = None,
    review: Reviewed = False,
    debug: Debug = False,
) -> None:
    """Make this site's whole contribution, one file, offline (tasks with trust 'local')."""

    def body() -> None:
        from fedgist.errors import Awaiting
        from fedgist.exchange.mailbox import place_file
        from fedgist.federation import open_site

        site = open_site(task, key, data, state, policy, ledger, review=review)
        try:
            gist = site.contribute()
        except Awaiting as e:  # nothing is wrong: called again after the decision, it goes on
            print(e)
            return
        finally:
            site.close()
        place_file(out, gist)
        print(f"Written to {out}: {len(gist):,} bytes. {site.agreement.plan.claim.line()}")

    guarded(body, debug)


def combine(
    gists: Annotated[list[Path], typer.Argument(help="The sites' gist files.")],
    task: TaskFile,
    key: Key,
    out: Out = Path("fedgist-out"),
    test: Test = None,
    state: State = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Make classifiers and synthetic images out of the files that sites have contributed."""

    def body() -> None:
        from fedgist.federation import combine as join_files
        from fedgist.summary import print_result

        with Bars() as tell:
            report = join_files(task, key, gists, out, state=state, test=test, progress=tell)
        show(report, as_json, lambda r: print_result(r, out))

    guarded(body, debug)


def serve(
    mailbox: Mailbox,
    task: TaskFile,
    key: Annotated[Path | None, typer.Option("--key", help="The coordinator's .key file.")] = None,
    out: Out = Path("fedgist-out"),
    test: Test = None,
    state: State = None,
    status: Annotated[
        bool, typer.Option("--status", help="Show which step it is in, and stop.")
    ] = False,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Coordinate a task through a shared folder. Stopped, it goes on where it was."""

    def body() -> None:
        from fedgist.errors import ConfigError
        from fedgist.federation import mailbox_state, serve_mailbox
        from fedgist.summary import print_record, print_result

        if status:
            show(mailbox_state(task, mailbox), as_json, print_record)
            return
        if key is None:
            raise ConfigError("--key must name the coordinator's .key file. Got none")
        with Bars() as tell:
            report = serve_mailbox(task, key, mailbox, out, state=state, test=test, progress=tell)
        show(report, as_json, lambda r: print_result(r, out))

    guarded(body, debug)


def join(
    mailbox: Mailbox,
    task: TaskFile,
    key: Key,
    data: Annotated[str, typer.Option("--data", help="This site's images.")],
    policy: Policy = None,
    ledger: LedgerFile = None,
    state: State = None,
    once: Annotated[
        bool, typer.Option("--once", help="Answer what is there and stop (for a scheduler).")
    ] = False,
    review: Reviewed = False,
    debug: Debug = False,
) -> None:
    """Take part in a task through a shared folder. Stopped, it goes on where it was."""

    def body() -> None:
        from fedgist.exchange.mailbox import join as answer
        from fedgist.federation import open_site

        site = open_site(task, key, data, state, policy, ledger, review=review)
        print(f"{site.name} joins '{site.agreement.task.name}' ({site.agreement.digest[:12]})")
        print(site.agreement.plan.claim.line())
        end = answer(site, mailbox, say=lambda line: print(line, flush=True), once=once)
        print(end or "not over yet: run it again")

    guarded(body, debug)


def ledger_show(
    ledger: LedgerFile = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Show every release of this holder's data and what they add up to."""

    def body() -> None:
        from fedgist.federation import open_ledger
        from fedgist.summary import print_ledger

        show(open_ledger(ledger).show(), as_json, print_ledger)

    guarded(body, debug)


def ledger_export(
    out: Annotated[Path, typer.Argument(help="A .json or .csv file.")],
    ledger: LedgerFile = None,
    debug: Debug = False,
) -> None:
    """Write the ledger to a file, for a data protection officer."""

    def body() -> None:
        from fedgist.federation import open_ledger

        open_ledger(ledger).export(out)
        print(f"Written to {out}")

    guarded(body, debug)


def ledger_cap(
    epsilon: Annotated[float, typer.Argument(help="No release may bring the total above this ε.")],
    delta: Annotated[float, typer.Option("--delta", help="δ at which the total is read.")] = 1e-5,
    ledger: LedgerFile = None,
    debug: Debug = False,
) -> None:
    """Set the most that any image of this holder may spend, over all tasks together."""

    def body() -> None:
        from fedgist.federation import open_ledger

        open_ledger(ledger).cap(epsilon, delta)
        print(f"No release may bring an image's total above ε = {epsilon:g} at δ = {delta:g}")

    guarded(body, debug)


def doctor(
    task: Annotated[Path | None, typer.Option("--task", help="A task file.")] = None,
    key: Annotated[Path | None, typer.Option("--key", help="A .key file.")] = None,
    mailbox: Annotated[Path | None, typer.Option("--mailbox", help="A shared folder.")] = None,
    data: Annotated[str | None, typer.Option("--data", help="Images.")] = None,
    policy: Policy = None,
    ledger: LedgerFile = None,
    server: Annotated[
        str | None, typer.Option("--server", help="HOST:PORT of a SuperLink, to try TLS.")
    ] = None,
    certificate: Annotated[
        Path | None, typer.Option("--root-certificate", help="The CA of that server.")
    ] = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Check everything that this site needs for a run; say what is wrong and what to do."""

    def body() -> None:
        from fedgist.doctor import examine
        from fedgist.summary import print_checks

        checks = examine(
            task=task,
            key=key,
            mailbox=mailbox,
            data=data,
            policy=policy,
            ledger=ledger,
            server=server,
            certificate=certificate,
        )
        show(checks, as_json, print_checks)
        if any(c["state"] == "bad" for c in checks):
            raise typer.Exit(1)

    guarded(body, debug)
