"""Flower as a carrier of letters: the coordinator is a ServerApp, every site a ClientApp.

The only file that imports `flwr`. It uses Flower's Message API alone: ``query`` messages over a
Grid. Letters are signed by their senders, so a SuperLink can lose them and nothing else; a node is
taken for a site when it signs a fresh number with the key that the task's roster gives.

Message types: ``query.fedgist_who`` (which site are you?) and ``query.fedgist`` (a letter). A reply
is the answering letter, or the kind of error in a word: what an error says of the data stays at the
site, in the log of its SuperNode.
"""

from __future__ import annotations

import secrets
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import final

from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from fedgist.errors import ConfigError, FedGistError, ProtocolError
from fedgist.exchange.transport import Failure, Take
from fedgist.exchange.worker import Place, answer_apart
from fedgist.privacy.identity import Identity, Public

__all__ = ["Connect", "FlowerTransport", "client_app", "find_sites", "server_app"]

LETTER, WHO = "fedgist", "fedgist_who"
PURPOSE = b"flower node"
POLL = 0.25  # seconds between two looks at the SuperLink
GRACE = 30.0  # seconds that a message lives on after nobody waits for it
STRIKES = 3  # failed attempts to read a reply before it is given up
END_PATIENCE = 30.0  # seconds to wait for sites to hear that the run is over
NODE_LIMIT = 3600.0  # seconds that a site works on one letter, unless its own `limit` says less
Say = Callable[[str], None]
Apart = Callable[[Place, bytes, float], bytes | Failure]
Connect = Callable[[Iterable[Public], float, float, Say], "FlowerTransport"]

READ_LOG = "read the log of its SuperNode"
# Flower's error codes (flwr.common.constant.ErrorCode), in words that lead somewhere.
FAULTS = {
    1: Failure("its node could not load the app", "install there the coordinator's FedGist"),
    2: Failure("the app failed there", READ_LOG),
    3: Failure("its node came too late for the request", "raise the task's patience"),
    4: Failure("its answer did not arrive whole", "see that its connection lasts; start again"),
    5: Failure(
        "its SuperNode shows no sign of life",
        "see that flower-supernode runs there and reaches the SuperLink",
    ),
    7: Failure("its SuperNode does not trust the app", "see its --trusted-entities"),
    8: Failure("the app was killed there", f"see whether its memory was full; {READ_LOG}"),
}


@final
@dataclass(frozen=True)
class FlowerTransport:
    """Carries letters over a Grid. A `Transport`.

    Attributes:
        grid: the ServerApp's.
        sites: site -> node, as `find_sites` returned.
        patience: seconds that a step waits for answers.
        poll: seconds between two looks.
        silent: sites that gave no answer the last time; they are not told of the end.
    """

    grid: Grid
    sites: Mapping[str, int]
    patience: float
    poll: float = POLL
    silent: set[str] = field(default_factory=set)

    def ask(self, step: str, requests: Mapping[str, bytes], take: Take) -> Mapping[str, Failure]:
        """See `Transport.ask`. One answer is in memory at a time."""
        failures: dict[str, Failure] = {}
        for name, answer in self._answers(step, requests, self.patience):
            if isinstance(answer, Failure):
                failures[name] = answer
            elif not take(name, answer):
                failures[name] = Failure("its answer is no good", "start again once it is mended")
        self.silent.difference_update(requests)
        self.silent.update(failures)
        return failures

    def end(self, letters: Mapping[str, bytes]) -> None:
        """See `Transport.end`. Waits a little: a run's messages end with the run."""
        told = {n: letter for n, letter in letters.items() if n not in self.silent}
        for _ in self._answers("end", told, min(self.patience, END_PATIENCE)):
            pass

    def _answers(
        self, step: str, letters: Mapping[str, bytes], patience: float
    ) -> Iterator[tuple[str, bytes | Failure]]:
        """Send every site its letter; yield what each answers, or why it does not."""
        pending: dict[str, str] = {}
        for name, letter in letters.items():
            if (node := self.sites.get(name)) is None:
                yield name, Failure("no node has its key", "start its SuperNode, with its `key`")
                continue
            about = ConfigRecord({"step": step, "patience": patience})
            content = RecordDict({"about": about, "letter": _wrapped(letter)})
            if (sent := _push(self.grid, content, node, LETTER, patience)) is None:
                yield name, Failure("the SuperLink did not take its request", "read its log")
            else:
                pending[sent] = name
        for name, reply in _replies(self.grid, pending, patience, self.poll):
            yield name, reply if isinstance(reply, Failure) else _letter_of(reply)


def find_sites(
    grid: Grid, roster: Iterable[Public], patience: float, *, say: Say, poll: float = POLL
) -> dict[str, int]:
    """Find out which node is which site.

    Every node that is or comes online is asked once. It must sign a fresh number, the run and its
    own number with a key in the roster; who does not, or does so second, is named and left out.

    Args:
        grid: the ServerApp's.
        roster: the sites' public keys.
        patience: seconds to wait until all are there.
        say: told of every node that is left out.
        poll: seconds between two looks.

    Returns:
        Site -> node, for the sites that are there.
    """
    keys = tuple(roster)
    found: dict[str, int] = {}
    asked: dict[str, tuple[int, bytes]] = {}  # message -> node, number to sign
    seen: set[int] = set()
    strikes: dict[str, int] = {}
    end = time.monotonic() + patience
    while True:
        for node in set(grid.get_node_ids()) - seen:
            seen.add(node)
            nonce = secrets.token_bytes(32)
            content = RecordDict({"about": ConfigRecord({"nonce": nonce})})
            if (sent := _push(grid, content, node, WHO, patience)) is not None:
                asked[sent] = (node, nonce)
        for sent in list(asked):
            if (reply := _pull(grid, sent, strikes)) is None:
                continue
            node, nonce = asked.pop(sent)
            oath = _oath(nonce, grid.run.run_id, node)
            who = reply if isinstance(reply, Failure) else _proved(reply, oath, keys)
            if isinstance(who, Failure):
                say(f"node {node} is not used: {who}")
            elif who.name in found:
                say(f"node {node} is not used: '{who.name}' is node {found[who.name]} already")
            else:
                found[who.name] = node
        if len(found) == len(keys) or time.monotonic() > end:
            return found
        time.sleep(poll)


def client_app(apart: Apart = answer_apart) -> ClientApp:
    """Return the app of a site.

    The node's own configuration (``flower-supernode --node-config``) says where things are:
    ``task``, ``key``, ``data``, and if wanted ``state``, ``policy``, ``ledger``, and ``limit``, the
    seconds after which work on a letter is given up. Nothing of it comes from the coordinator.

    Args:
        apart: works out an answer, as `answer_apart` does.
    """
    app = ClientApp()

    @app.query(WHO)
    def who(message: Message, context: Context) -> Message:
        try:
            identity = Identity.load(Place.of(context.node_config).key)
            nonce = message.content.config_records["about"]["nonce"]
            if not isinstance(nonce, bytes) or len(nonce) != 32:
                raise ProtocolError("a number to sign must have 32 bytes. Got something else")
            signature = identity.sign(_oath(nonce, context.run_id, context.node_id), PURPOSE)
            answer = ConfigRecord({"site": identity.public.text(), "signature": signature})
        except Exception as e:  # flwr would send its text to the server
            return _refusal(message, e)
        return Message(RecordDict({"about": answer}), reply_to=message)

    @app.query(LETTER)
    def letter(message: Message, context: Context) -> Message:
        try:
            patience = _seconds(message.content.config_records["about"]["patience"])
            limit = min(patience, _seconds(context.node_config.get("limit", NODE_LIMIT)))
            answer = apart(Place.of(context.node_config), _unwrapped(message), limit)
        except Exception as e:
            return _refusal(message, e)
        if isinstance(answer, Failure):
            return _fault(message, answer.cause)
        return Message(RecordDict({"letter": _wrapped(answer)}), reply_to=message)

    return app


def server_app(coordinate: Callable[[Connect, Mapping[str, object]], None]) -> ServerApp:
    """Return the app of the coordinator.

    Args:
        coordinate: does the work, given what connects it to the sites, and the run's configuration
            with its number as ``run``. What it raises makes the run a failed one.
    """
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        def connect(
            roster: Iterable[Public], wait: float, patience: float, say: Say
        ) -> FlowerTransport:
            return FlowerTransport(grid, find_sites(grid, roster, wait, say=say), patience)

        coordinate(connect, dict(context.run_config) | {"run": context.run_id})

    return app


def _push(grid: Grid, content: RecordDict, node: int, action: str, patience: float) -> str | None:
    """Send one message; return its number, or None when the SuperLink did not take it."""
    message = Message(content, node, f"query.{action}", ttl=patience + GRACE)
    sent = list(grid.push_messages([message]))
    return sent[0] if sent and sent[0] else None


def _pull(grid: Grid, sent: str, strikes: dict[str, int]) -> Message | Failure | None:
    """Look for the reply to one message.

    One at a time: the SuperLink hands a reply out once, so that one that cannot be read would take
    all that came with it along; and 300 MB of one site are not held beside those of another.
    """
    try:
        replies = [m for m in grid.pull_messages([sent]) if m.metadata.reply_to_message_id == sent]
    except Exception as e:  # what a node sends must not end the run
        strikes[sent] = strikes.get(sent, 0) + 1
        return _unreadable(e) if strikes[sent] >= STRIKES else None
    if not replies:
        return None
    if not replies[0].has_error():
        return replies[0]
    error = replies[0].error
    known = FAULTS.get(error.code, Failure("Flower reports an error", "read the SuperLink's log"))
    return Failure(f"{known.cause} (Flower's code {error.code})", known.remedy)


def _replies(
    grid: Grid, pending: dict[str, str], patience: float, poll: float
) -> Iterator[tuple[str, Message | Failure]]:
    """Yield replies as they come, and at the end a failure for each site that kept silent."""
    strikes: dict[str, int] = {}
    end = time.monotonic() + patience
    last = False
    while pending and not last:
        last = time.monotonic() > end  # one more look: whoever was in time is heard
        before = len(pending)
        for sent in list(pending):
            if (reply := _pull(grid, sent, strikes)) is not None:
                yield pending.pop(sent), reply
        if len(pending) == before and not last:
            time.sleep(poll)
    for name in pending.values():
        remedy = "see that its SuperNode runs and is not busy with another run"
        yield name, Failure(f"no answer in {patience:g} s", remedy)


def _letter_of(reply: Message) -> bytes | Failure:
    """Return what a site sent: a letter, or why there is none."""
    try:
        fault = reply.content.config_records.get("fault")
        return _unwrapped(reply) if fault is None else _gave_up(fault)
    except (FedGistError, KeyError, TypeError, ValueError) as e:
        return _unreadable(e)


def _proved(reply: Message, oath: bytes, keys: Iterable[Public]) -> Public | Failure:
    """Return the site that a node has proved to be."""
    try:
        if (fault := reply.content.config_records.get("fault")) is not None:
            return _gave_up(fault)
        about = reply.content.config_records["about"]
        claimed, signature = Public.of(str(about["site"])), about["signature"]
    except (FedGistError, KeyError, TypeError, ValueError) as e:
        return _unreadable(e)
    if claimed not in keys:
        return Failure(
            f"its key, '{claimed.name}' {claimed.fingerprint}, is not in the task's roster"
        )
    if not isinstance(signature, bytes) or not claimed.verify(signature, oath, PURPOSE):
        return Failure(f"it does not hold the key of '{claimed.name}'")
    return claimed


def _gave_up(fault: ConfigRecord) -> Failure:
    kind = str(fault["kind"])[:40]
    if kind == "TimeoutError":
        return Failure("it did not finish in time", f"see its `limit`; {READ_LOG}")
    return Failure(f"it gave up ({kind})", READ_LOG)


def _unreadable(error: Exception) -> Failure:
    return Failure(
        f"its answer could not be read ({type(error).__name__})",
        "install there the coordinator's FedGist",
    )


def _refusal(message: Message, error: Exception) -> Message:
    """Say in full here, and in one word there, what went wrong."""
    text = str(error) if isinstance(error, FedGistError) else repr(error)
    print(f"fedgist: not answered: {text}", file=sys.stderr, flush=True)
    return _fault(message, type(error).__name__)


def _fault(message: Message, kind: str) -> Message:
    return Message(RecordDict({"fault": ConfigRecord({"kind": kind})}), reply_to=message)


def _wrapped(letter: bytes) -> ArrayRecord:
    """Return bytes as one uint8 array, which Flower sends in chunks of 5 MiB."""
    return ArrayRecord({"bytes": Array("uint8", (len(letter),), "fedgist.letter", letter)})


def _unwrapped(message: Message) -> bytes:
    """Undo `_wrapped`.

    Raises:
        ProtocolError: the message holds something else.
    """
    record = message.content.array_records.get("letter")
    if record is None or list(record) != ["bytes"]:
        raise ProtocolError("a message must hold one letter. Got something else")
    return bytes(record["bytes"].data)


def _seconds(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise ConfigError(f"seconds must be a number above 0. Got {value!r}")
    return float(value)


def _oath(nonce: bytes, run: int, node: int) -> bytes:
    return nonce + run.to_bytes(8, "big") + node.to_bytes(8, "big")
