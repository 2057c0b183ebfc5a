"""A Grid in one process: no sockets, but every message goes through Flower's own wire format."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.constant import SUPERLINK_NODE_ID, ErrorCode
from flwr.serverapp import Grid
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity

RUN = 2**63 + 17


@dataclass
class Node:
    """One node: its app, its configuration, and what goes wrong at its k-th letter (from 0).

    Faults: ``silent`` (no answer), ``error`` (the app raises), ``killed`` (this and all that
    follows end in code 5, sent by another node), ``garbage`` (an answer that cannot be inflated).
    """

    app: ClientApp
    config: dict[str, Any]
    faults: Mapping[int, str] = field(default_factory=dict)
    appears: float = 0.0
    letters: int = 0
    state: RecordDict = field(default_factory=RecordDict)


class InProcessGrid(Grid):
    """Runs a message when it is pushed; hands a reply out once, as the SuperLink does."""

    def __init__(self, nodes: Mapping[int, Node], run: int = RUN) -> None:
        self.nodes = dict(nodes)
        self.replies: dict[str, Message | None] = {}
        self.pushed: list[Message] = []
        self.pulls: Counter[str] = Counter()
        self._run = Run.create_empty(run)
        self._born = time.monotonic()
        TaskIdentity.run_id, TaskIdentity.task_id = run, 1
        TaskIdentity.node_id = SUPERLINK_NODE_ID

    @property
    def run(self) -> Run:
        return self._run

    def set_run(self, run: Run) -> None:
        self._run = run

    def create_message(self, *args: Any, **more: Any) -> Message:
        raise NotImplementedError("deprecated in Flower")

    def send_and_receive(self, *args: Any, **more: Any) -> Iterable[Message]:
        raise NotImplementedError("it polls every three seconds")

    def get_node_ids(self) -> Iterable[int]:
        age = time.monotonic() - self._born
        return [n for n, node in self.nodes.items() if node.appears <= age]

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        return [self._push(m) for m in messages]

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        found = []
        for sent in message_ids:
            self.pulls[sent] += 1
            if sent in self.replies:
                reply = self.replies.pop(sent)
                if reply is None:
                    self.replies[sent] = None
                    raise KeyError("an object's type that nobody knows")
                found.append(reply)
        return found

    def _push(self, message: Message) -> str:
        message.metadata.__dict__["_message_id"] = sent = message.object_id
        self.pushed.append(message)
        node = self.nodes[message.metadata.dst_node_id]
        fault = None
        if message.metadata.message_type == "query.fedgist":
            fault = node.faults.get(node.letters)
            if any(k <= node.letters and f == "killed" for k, f in node.faults.items()):
                fault = "killed"
            node.letters += 1
        if fault == "garbage":
            self.replies[sent] = None
        elif fault != "silent":
            self.replies[sent] = self._reply(node, over_the_wire(message), fault)
        return sent

    def _reply(self, node: Node, message: Message, fault: str | None) -> Message:
        number = message.metadata.dst_node_id
        TaskIdentity.node_id = number
        try:
            if fault == "killed":
                reply = Message(Error(ErrorCode.NODE_UNAVAILABLE, "gone"), reply_to=message)
                reply.metadata.__dict__["_src_node_id"] = SUPERLINK_NODE_ID
                return reply
            context = Context(self.run.run_id, number, node.config, node.state, {})
            try:
                if fault == "error":
                    raise ZeroDivisionError("in the app")
                reply = node.app(message, context)
            except Exception as e:
                error = Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, f"{type(e)}:<'{e}'>")
                reply = Message(error, reply_to=message)
            return over_the_wire(reply)
        finally:
            TaskIdentity.node_id = SUPERLINK_NODE_ID


def over_the_wire(message: Message) -> Message:
    """Take a message apart into bytes and put it together again."""
    number = message.object_id
    contents = {k: v.deflate() for k, v in get_all_nested_objects(message).items()}
    back = inflate_object_from_contents(number, contents)
    assert isinstance(back, Message)
    back.metadata.__dict__["_message_id"] = number
    return back
