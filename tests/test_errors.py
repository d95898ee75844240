"""The error tree: pickles, carries the call, reads well."""

from __future__ import annotations

import pickle

import pytest

import agent_reach.errors as errors
from agent_reach.errors import Attempt, ReachError

ATTEMPTS = (
    Attempt(1, "kb-1", "http://10.0.0.1:1", "never_sent", "connect: refused", 0.001),
    Attempt(2, "kb-2", "http://10.0.0.2:1", "maybe_executed", "reset", 0.25),
)
SPECIFIC = {
    "AgentIdInUse": {"agent_id": "a"},
    "AgentNotFound": {"near": ("x.y.v2",)},
    "DeadlineExceeded": {"phase": "answer"},
    "InvalidPayload": {"problems": (("limit", "not a number"),)},
    "NoHealthyAgent": {"retry_after_s": 3.0},
    "OutcomeUnknown": {"agent_id": "a"},
    "Overloaded": {"retry_after_s": 1.0},
    "RegistryUnavailable": {"endpoints": ("etcd://h:1",)},
    "RemoteError": {"agent_id": "a", "remote_type": "KeyError", "remote_message": "x", "status": 500},
}
CLASSES = [getattr(errors, name) for name in errors.__all__ if name != "Attempt"]


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_every_error_is_in_the_tree_and_pickles_whole(cls: type[ReachError]) -> None:
    error = cls(
        "what happened", capability="x.y.v1", request_id="r", attempts=ATTEMPTS, **SPECIFIC.get(cls.__name__, {})
    )
    assert isinstance(error, ReachError)
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is cls
    assert copy.__dict__ == error.__dict__
    assert str(copy) == str(error)


def test_several_attempts_are_listed_in_the_message() -> None:
    text = str(ReachError("no luck", attempts=ATTEMPTS))
    assert "#1 kb-1 at http://10.0.0.1:1: never_sent (connect: refused) after 1 ms" in text
    assert "#2 kb-2" in text
    assert str(ReachError("no luck", attempts=ATTEMPTS[:1])) == "no luck"
