"""Declaring handlers: what is accepted, what is refused and why, how payloads and results pass."""

from __future__ import annotations

import asyncio
import contextvars
import dataclasses
import datetime
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Optional

import pytest
from pydantic import BaseModel, ConfigDict, Field
from typing_extensions import TypedDict

from agent_reach.context import CallContext, current_call
from agent_reach.errors import ConfigError, InvalidPayload, InvalidReply
from agent_reach.handlers import HandlerSpec, capability, register_agent, specs_of

if TYPE_CHECKING:
    from agent_reach.context import CallContext as OnlyForCheckers


def context(**changes: Any) -> CallContext:
    values: dict[str, Any] = {
        "request_id": "r-1",
        "trace_id": "0" * 32,
        "from_agent": "chat-1",
        "capability": "a.b.v1",
        "deadline": 10.0,
        "now": lambda: 0.0,
    }
    return CallContext(**values | changes)


def spec_of(handler: Any) -> HandlerSpec:
    (spec,) = specs_of([handler])
    return spec


async def answer(handler: Any, payload: dict[str, Any]) -> bytes:
    spec = spec_of(handler)
    return spec.encode(await spec.invoke(spec.bind(payload, context())))


def refused(handler: Any, payload: dict[str, Any]) -> InvalidPayload:
    with pytest.raises(InvalidPayload) as caught:
        spec_of(handler).bind(payload, context())
    return caught.value


# --- the decorated thing stays what it was ---------------------------------------------------------------


@register_agent("knowledge.retrieve.v1", idempotent=True, timeout="heavy", max_concurrency=10, queue=5)
async def retrieve(query: str, limit: int = 5) -> list[str]:
    """Find articles that
    answer a question.

    More text that callers needn't see.
    """
    return [query] * limit


@register_agent("knowledge.count.v1")
def count(words: list[str]) -> int:
    return len(words)


async def test_a_decorated_function_is_called_as_before() -> None:
    assert await retrieve("flood", limit=2) == ["flood", "flood"]
    assert count(["a", "b"]) == 2


def test_a_spec_says_what_was_declared() -> None:
    info = spec_of(retrieve).info
    assert info.name == "knowledge.retrieve.v1"
    assert info.description == "Find articles that answer a question."
    assert (info.idempotent, info.timeout, info.max_concurrency) == (True, "heavy", 10)
    assert spec_of(retrieve).queue == 5
    assert spec_of(retrieve).input_schema == {
        "type": "object",
        "properties": {
            "query": {"type": "string", "title": "Query"},
            "limit": {"type": "integer", "title": "Limit", "default": 5},
        },
        "required": ["query"],
        "additionalProperties": False,
    }
    assert spec_of(retrieve).output_schema == {"type": "array", "items": {"type": "string"}}


def test_an_explicit_description_wins_and_the_version_is_the_contracts() -> None:
    @register_agent("a.b.v1", description="Short.", version="2.1.0", timeout=7)
    def handler() -> None:
        """Long."""

    spec = spec_of(handler)
    assert (spec.info.description, spec.info.version, spec.info.timeout) == ("Short.", "2.1.0", 7.0)
    assert spec.agent_version == "2.1.0"


# --- payloads --------------------------------------------------------------------------------------------


async def test_sync_and_async_handlers_answer() -> None:
    assert await answer(retrieve, {"query": "q", "limit": 2}) == b'["q","q"]'
    assert await answer(count, {"words": ["a"]}) == b"1"


def test_every_field_at_fault_is_named_with_the_reason() -> None:
    error = refused(retrieve, {"limit": "many"})
    assert dict(error.problems) == {
        "query": "Field required",
        "limit": "Input should be a valid integer, unable to parse string as an integer",
    }
    assert "knowledge.retrieve" not in error.message  # the name asked for is the context's
    assert "a.b.v1" in error.message
    assert "query: Field required" in error.message
    assert (error.capability, error.request_id) == ("a.b.v1", "r-1")


def test_a_misspelt_key_is_refused_with_the_near_name() -> None:
    error = refused(retrieve, {"query": "q", "limti": 3})
    assert error.problems == (("limti", "unknown field; did you mean 'limit'?"),)


def test_the_values_of_a_refused_payload_are_not_in_the_message() -> None:
    assert "hunter2" not in str(refused(retrieve, {"query": "q", "limit": "hunter2"}))


def test_keyword_catch_all_takes_unknown_keys_checked_by_its_type() -> None:
    @register_agent("a.b.v1")
    def handler(query: str, ctx: CallContext, **extra: int) -> None: ...

    bound = spec_of(handler).bind({"query": "q", "n": "3"}, ctx := context())
    assert bound == {"query": "q", "n": 3, "ctx": ctx}
    assert [field for field, _ in refused(handler, {"query": "q", "n": "x"}).problems] == ["n"]


def test_a_payload_can_not_fill_the_context_parameter() -> None:
    @register_agent("a.b.v1")
    def handler(ctx: CallContext, query: str = "") -> None: ...

    @register_agent("a.b.v2")
    def open_ended(ctx: CallContext, **extra: Any) -> None: ...

    for refusing in (handler, open_ended):
        assert [field for field, _ in refused(refusing, {"ctx": {}}).problems] == ["ctx"]


class Question(BaseModel):
    query: str
    since: datetime.date | None = None


class Typed(TypedDict):
    query: str


@pytest.mark.parametrize("annotation", [dict, dict[str, Any], Mapping[str, Any], Annotated[dict, Field()], Typed])
def test_a_lone_mapping_parameter_takes_the_whole_payload(annotation: Any) -> None:
    def handler(payload, ctx: CallContext):  # type: ignore[no-untyped-def]
        ...

    handler.__annotations__["payload"] = annotation
    register_agent("a.b.v1")(handler)
    assert spec_of(handler).bind({"query": "x"}, context())["payload"] == {"query": "x"}


class Order(BaseModel):
    customer: str


def test_a_model_sent_under_the_parameters_name_is_told_what_to_send() -> None:
    @register_agent("shop.order.v1")
    def handler(order: Order) -> None: ...

    error = refused(handler, {"order": {"customer": "Alice"}})
    assert error.problems[0] == ("order", "send the fields of Order directly, not inside 'order'")
    assert ("customer", "Field required") in error.problems
    assert "send the fields of Order directly" in error.message


@pytest.mark.parametrize("payload", [{}, {"order": {}, "customers": 1}, {"ordre": {"customer": "Alice"}}])
def test_the_hint_is_only_given_where_it_is_meant(payload: dict[str, Any]) -> None:
    @register_agent("shop.order.v1")
    def handler(order: Order) -> None: ...

    assert "directly" not in refused(handler, payload).message


def test_a_model_with_a_field_of_the_parameters_name_is_no_mistake() -> None:
    class Wrapped(BaseModel):
        order: Order

    @register_agent("shop.order.v1")
    def handler(order: Wrapped) -> None: ...

    assert "directly" not in refused(handler, {"order": {}}).message
    assert spec_of(handler).bind({"order": {"customer": "Alice"}}, context())["order"].order.customer == "Alice"


def test_a_lone_model_parameter_takes_the_whole_payload() -> None:
    @register_agent("a.b.v1")
    def handler(question: Question) -> str:
        return question.query

    bound = spec_of(handler).bind({"query": "x", "since": "2026-01-02"}, context())
    assert bound == {"question": Question(query="x", since=datetime.date(2026, 1, 2))}
    assert [field for field, _ in refused(handler, {"since": "yesterday"}).problems] == ["query", "since"]
    assert spec_of(handler).input_schema["title"] == "Question"


def test_a_model_beside_another_parameter_binds_by_name() -> None:
    @register_agent("a.b.v1")
    def handler(question: Question, limit: int) -> None: ...

    bound = spec_of(handler).bind({"question": {"query": "x"}, "limit": 1}, context())
    assert bound == {"question": Question(query="x"), "limit": 1}


def test_names_that_models_reserve_are_usable_as_parameters() -> None:
    @register_agent("a.b.v1")
    def handler(schema: str, json: int, model_config: int, _hidden: int = 1, copy=None) -> None: ...  # type: ignore[no-untyped-def]

    bound = spec_of(handler).bind({"schema": "s", "json": 1, "model_config": 2, "copy": [3]}, context())
    assert bound == {"schema": "s", "json": 1, "model_config": 2, "copy": [3]}


def test_constraints_in_annotated_hold() -> None:
    @register_agent("a.b.v1")
    def handler(limit: Annotated[int, Field(ge=1)] = 5) -> None: ...

    assert refused(handler, {"limit": 0}).problems[0][0] == "limit"


def test_the_context_is_given_whatever_way_it_is_annotated() -> None:
    @register_agent("a.b.v1")
    def plain(ctx: CallContext) -> None: ...

    @register_agent("a.b.v2")
    def optional(ctx: Optional[CallContext] = None) -> None: ...  # noqa: UP045

    @register_agent("a.b.v3")
    def union(ctx: CallContext | None = None) -> None: ...

    for spec in specs_of([plain, optional, union]):
        assert spec.bind({}, ctx := context()) == {"ctx": ctx}
        assert spec.input_schema["properties"] == {}


def test_a_context_imported_for_type_checkers_only_is_understood() -> None:
    namespace: dict[str, Any] = {"register_agent": register_agent}
    exec(
        "from __future__ import annotations\n@register_agent('a.b.v1')\ndef handler(ctx: CallContext): ...\n",
        namespace,
    )
    assert spec_of(namespace["handler"]).bind({}, ctx := context()) == {"ctx": ctx}


def test_types_local_to_a_function_are_found() -> None:
    class Local(BaseModel):
        n: int

    @register_agent("a.b.v1")
    def handler(item: Local, other: int = 0) -> Local:
        return item

    assert spec_of(handler).bind({"item": {"n": 1}}, context()) == {"item": Local(n=1)}


@register_agent("a.later.v1")
def uses_later(item: Later, other: int = 0) -> Later:
    return item


class Later(BaseModel):
    n: int


async def test_a_type_defined_further_down_is_read_when_the_client_is_made() -> None:
    assert await answer(uses_later, {"item": {"n": 1}}) == b'{"n":1}'


def test_a_type_that_is_never_defined_is_an_error_when_the_client_is_made() -> None:
    @register_agent("a.b.v1")
    def handler(item: OnlyForCheckers, other: Nowhere) -> None: ...  # type: ignore[name-defined]  # noqa: F821

    with pytest.raises(ConfigError, match=r"handler: a type hint names what isn't defined: .*OnlyForCheckers"):
        specs_of([handler])


# --- running ---------------------------------------------------------------------------------------------


async def test_a_sync_handler_runs_off_the_loop_and_sees_the_callers_context_variables() -> None:
    seen: list[Any] = []

    @register_agent("a.b.v1")
    def handler() -> None:
        seen.extend([threading.current_thread(), current_call.get()])

    token = current_call.set(ctx := context())
    try:
        await answer(handler, {})
    finally:
        current_call.reset(token)
    assert seen[0] is not threading.main_thread()
    assert seen[1] is ctx


@pytest.mark.parametrize("error", [ValueError("x"), StopIteration("x"), SystemExit(3)])
async def test_what_a_sync_handler_raises_comes_through(error: BaseException) -> None:
    @register_agent("a.b.v1")
    def handler() -> None:
        raise error

    with pytest.raises((type(error), RuntimeError)):
        await answer(handler, {})


async def test_many_sync_handlers_run_side_by_side_whatever_the_loops_executor_allows() -> None:
    gate = threading.Barrier(40)

    @register_agent("a.b.v1")
    def handler() -> None:
        gate.wait(timeout=10)

    spec = spec_of(handler)
    await asyncio.gather(*(spec.invoke({}) for _ in range(40)))


async def test_a_cancelled_sync_handler_counts_as_running_until_it_ends() -> None:
    go, done = threading.Event(), threading.Event()

    @register_agent("a.b.v1")
    def handler() -> str:
        go.wait(timeout=10)
        done.set()
        return "late"

    task = asyncio.create_task(spec_of(handler).invoke({}))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    task.cancel()
    for _ in range(5):
        await asyncio.sleep(0)
    assert not task.done()
    go.set()
    assert await task == "late"
    assert done.is_set()


async def test_a_second_cancellation_leaves_the_thread_behind() -> None:
    go = threading.Event()

    @register_agent("a.b.v1")
    def handler() -> None:
        go.wait(timeout=10)

    task = asyncio.create_task(spec_of(handler).invoke({}))
    for _ in range(2):
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    go.set()


def test_a_thread_that_outlives_its_loop_ends_quietly() -> None:
    go = threading.Event()
    left: list[threading.Thread] = []

    @register_agent("a.b.v1")
    def handler() -> None:
        left.append(threading.current_thread())
        go.wait(timeout=10)

    async def main() -> None:
        task = asyncio.create_task(spec_of(handler).invoke({}))
        while not left:
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.sleep(0)

    began = time.monotonic()
    asyncio.run(main())
    assert time.monotonic() - began < 5
    go.set()
    left[0].join(timeout=5)
    assert not left[0].is_alive()


async def test_a_sync_function_that_returns_an_awaitable_is_awaited() -> None:
    @register_agent("a.b.v1")
    def handler() -> Any:
        async def inner() -> int:
            return 7

        return inner()

    assert await answer(handler, {}) == b"7"


# --- results ---------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Point:
    x: float
    when: datetime.date


async def test_models_dataclasses_and_dates_become_json() -> None:
    @register_agent("a.b.v1")
    async def model() -> Question:
        return Question(query="q", since=datetime.date(2026, 1, 2))

    @register_agent("a.b.v2")
    async def data() -> list[Point]:
        return [Point(1.5, datetime.date(2026, 1, 2))]

    @register_agent("a.b.v3")
    async def untyped():  # type: ignore[no-untyped-def]
        return {"q": Question(query="q"), "none": None, "set": {1}}

    assert await answer(model, {}) == b'{"query":"q","since":"2026-01-02"}'
    assert await answer(data, {}) == b'[{"x":1.5,"when":"2026-01-02"}]'
    assert await answer(untyped, {}) == b'{"q":{"query":"q","since":null},"none":null,"set":[1]}'


async def test_a_subclass_shows_only_what_the_annotation_declares() -> None:
    class Secret(Question):
        password: str

    @register_agent("a.b.v1")
    async def handler() -> Question:
        return Secret(query="q", password="hunter2")

    assert b"hunter2" not in await answer(handler, {})


@pytest.mark.parametrize(
    ("annotation", "result", "message"),
    [
        (int, "x", r"return annotation: \(whole\): Input should be a valid integer"),
        (list[int], [1, "x"], "return annotation: 1: Input"),
        (Question, {"since": None}, "return annotation: query: Field required"),
        (type(None), 3, "return annotation"),
        (Any, {"a": [0.0, float("nan")]}, r"no JSON form: a\.1: Out of range float"),
        (list[float], [float("inf")], "no JSON form: 0: Out of range"),
        (dict[str, Any], {"a": {"b": object()}}, r"no JSON form: a\.b: .*object"),
        (str, "\ud800", "return annotation|no JSON form"),
        (Any, "\ud800", r"no JSON form: \(whole\)"),
        (Point, Point(float("nan"), datetime.date(2026, 1, 2)), "no JSON form: x: Out of range"),
    ],
)
async def test_a_result_that_does_not_fit_names_the_field(annotation: Any, result: Any, message: str) -> None:
    async def handler():  # type: ignore[no-untyped-def]
        return result

    handler.__annotations__["return"] = annotation
    register_agent("a.b.v1")(handler)
    with pytest.raises(InvalidReply, match=message):
        await answer(handler, {})


async def test_a_model_filled_past_its_types_is_refused() -> None:
    @register_agent("a.b.v1")
    async def handler() -> Question:
        return Question.model_construct(query=3)  # type: ignore[arg-type]

    with pytest.raises(InvalidReply):
        await answer(handler, {})


async def test_a_result_that_holds_itself_is_refused() -> None:
    @register_agent("a.b.v1")
    async def handler():  # type: ignore[no-untyped-def]
        loop: list[Any] = []
        loop.append(loop)
        return loop

    with pytest.raises(InvalidReply):
        await answer(handler, {})


# --- contracts -------------------------------------------------------------------------------------------


def test_the_schema_hash_follows_the_contract_and_not_the_words() -> None:
    def make(described: str, **fields: Any) -> str | None:
        class Body(BaseModel):
            model_config = ConfigDict(title=described)
            __doc__ = described
            title: str = Field(description=described)
            size: fields.get("size", int) = 1  # type: ignore[valid-type]

        def handler(body: Any) -> Any: ...

        handler.__annotations__.update(body=Body)
        register_agent("a.b.v1")(handler)
        return spec_of(handler).info.schema_hash

    assert make("one") == make("two")
    assert make("one") != make("one", size=str)
    assert len(make("one") or "") == 16


# --- classes ---------------------------------------------------------------------------------------------


@register_agent(name="kb-agent", version="1.2.0", weight=2, metadata={"team": "kb"})
class KnowledgeAgent:
    def __init__(self, prefix: str = "") -> None:
        self.prefix = prefix

    @capability("kb.find.v1", idempotent=True, timeout="heavy")
    async def find(self, query: str) -> str:
        """Find."""
        return self.prefix + query

    @capability("kb.add.v1", "kb.append.v1")
    def add(self, text: str, ctx: CallContext) -> str:
        return f"{self.prefix}{text} for {ctx.from_agent}"

    @staticmethod
    @capability("kb.size.v1")
    def size() -> int:
        return 3

    @classmethod
    @capability("kb.kind.v1")
    def kind(cls) -> str:
        return cls.__name__

    def helper(self) -> None: ...


async def test_a_class_offers_its_methods() -> None:
    specs = {spec.info.name: spec for spec in specs_of([KnowledgeAgent("p-")])}
    assert list(specs) == ["kb.find.v1", "kb.add.v1", "kb.append.v1", "kb.size.v1", "kb.kind.v1"]
    results = {
        name: spec.encode(await spec.invoke(spec.bind(payload, context())))
        for name, payload in {
            "kb.find.v1": {"query": "q"},
            "kb.append.v1": {"text": "t"},
            "kb.size.v1": {},
            "kb.kind.v1": {},
        }.items()
        for spec in [specs[name]]
    }
    assert results == {
        "kb.find.v1": b'"p-q"',
        "kb.append.v1": b'"p-t for chat-1"',
        "kb.size.v1": b"3",
        "kb.kind.v1": b'"KnowledgeAgent"',
    }
    spec = specs["kb.find.v1"]
    assert (spec.agent_name, spec.agent_version, spec.weight, spec.metadata) == (
        "kb-agent",
        "1.2.0",
        2.0,
        {"team": "kb"},
    )
    assert (spec.info.version, spec.info.idempotent) == ("1.0.0", True)


def test_a_class_that_needs_no_arguments_is_made_for_the_user() -> None:
    assert len(specs_of([KnowledgeAgent])) == 5


def test_a_class_that_needs_arguments_asks_for_an_instance() -> None:
    @register_agent()
    class Needy:
        def __init__(self, url: str) -> None: ...

        @capability("a.b.v1")
        def handler(self) -> None: ...

    with pytest.raises(ConfigError, match="Needy needs url to be built; pass an instance"):
        specs_of([Needy])


def test_a_bound_method_is_a_handler_and_brings_its_class() -> None:
    spec = spec_of(KnowledgeAgent("x").find)
    assert (spec.info.name, spec.agent_name) == ("kb.find.v1", "kb-agent")


async def test_a_method_may_name_its_first_parameter_as_it_likes() -> None:
    @register_agent()
    class Odd:
        @capability("a.b.v1")
        def handler(this, n: int) -> int:
            return n

    assert await answer(Odd(), {"n": 1}) == b"1"
    assert await answer(Odd().handler, {"n": 1}) == b"1"


async def test_a_method_may_name_its_own_class() -> None:
    @register_agent()
    class Tree(BaseModel):
        n: int = 1

        @capability("a.b.v1")
        def grow(self, other: Tree, by: int = 1) -> Tree:
            return Tree(n=other.n + by)

    assert await answer(Tree(), {"other": {"n": 2}}) == b'{"n":3}'


async def test_an_override_keeps_the_capability_of_its_base() -> None:
    class Special(KnowledgeAgent):
        async def find(self, query: str) -> str:
            return "special"

    (spec,) = [spec for spec in specs_of([Special()]) if spec.info.name == "kb.find.v1"]
    assert await spec.invoke(spec.bind({"query": "q"}, context())) == "special"


def test_a_method_given_without_its_object_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"is a method; pass it bound: instance\.find"):
        specs_of([KnowledgeAgent.find])


async def test_a_wrapper_made_with_functools_wraps_keeps_the_declaration() -> None:
    import functools

    calls = []

    @functools.wraps(retrieve)
    async def logged(*args: Any, **kwargs: Any) -> Any:
        calls.append(kwargs)
        return await retrieve(*args, **kwargs)

    assert await answer(logged, {"query": "q", "limit": 1}) == b'["q"]'
    assert calls == [{"query": "q", "limit": 1}]


# --- wrong declarations fail at decoration ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"names": ("knowledge",)}, "no capability name"),
        ({"names": ("Knowledge.Retrieve",)}, r"Did you mean 'knowledge\.retrieve\.v1'"),
        ({"names": (lambda: None,)}, "needs brackets and a name"),
        ({"timeout": "fast"}, "one of light, interactive, write, heavy, long, or seconds > 0"),
        ({"timeout": 0}, "seconds > 0"),
        ({"timeout": float("nan")}, "seconds > 0"),
        ({"timeout": True}, "seconds > 0"),
        ({"timeout": None}, "seconds > 0"),
        ({"max_concurrency": 0}, "max_concurrency=0 must be a whole number >= 1"),
        ({"max_concurrency": 1.5}, "max_concurrency"),
        ({"queue": -1}, "queue=-1 must be a whole number >= 0"),
        ({"weight": 0}, "weight=0 must be a number > 0"),
        ({"weight": float("nan")}, "weight=nan"),
        ({"weight": "2"}, "weight="),
        ({"metadata": {"a": 1}}, "metadata must map strings to strings"),
        ({"metadata": ["a"]}, "metadata must"),
        ({"version": "1"}, "semantic version"),
        ({"version": "v1.0.0"}, "semantic version"),
        ({"idempotent": "yes"}, "idempotent='yes' must be True or False"),
        ({"soft_aliases": "v0"}, "must be a list"),
        ({"soft_aliases": ["v1"]}, "must be another version"),
        ({"description": 3}, "description=3 must be text"),
        ({"name": "a b"}, "name: agent id 'a b'"),
    ],
)
def test_a_wrong_option_fails_at_once_with_the_reason(options: dict[str, Any], message: str) -> None:
    names = options.pop("names", ("a.b.v1",))
    with pytest.raises(ConfigError, match=message):
        register_agent(*names, **options)


async def streamed() -> AsyncIterator[int]:
    yield 1


def generated() -> Iterator[int]:
    yield 1


def starred(*args: int) -> None: ...
def positional(a: int, /) -> None: ...
def callback(f: Callable[[], int]) -> None: ...
def opaque(lock: threading.Event) -> None: ...
def opaque_result() -> contextvars.Context: ...  # type: ignore[empty-body]
def field_default(limit: int = Field(5, ge=1)) -> None: ...
def broken_hint(a: 3 | None) -> None: ...  # type: ignore[valid-type]


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (streamed, "yields; streamed answers aren't supported yet"),
        (generated, "yields"),
        (starred, r"\*args can't be filled from a payload"),
        (positional, "'a' is positional-only"),
        (callback, "parameter 'f'|no JSON schema"),
        (opaque, "parameter 'lock' has a type that JSON can't carry"),
        (opaque_result, "the return annotation has a type that JSON can't carry"),
        (field_default, r"write 'limit' as Annotated\[type, Field"),
        (broken_hint, "a type hint can't be read"),
        (lambda: None, "must be a function written with def"),
        (staticmethod(starred), "write @staticmethod above"),
        (classmethod(starred), "write @classmethod above"),
        (3, "must be a function written with def"),
    ],
)
def test_what_can_not_be_a_handler_is_refused_at_decoration(target: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        register_agent("a.b.v1")(target)


def test_a_function_needs_a_capability_name() -> None:
    with pytest.raises(ConfigError, match="name a capability, as @register_agent"):
        register_agent()(lambda: None)
    with pytest.raises(ConfigError, match="name a capability, as @capability"):
        capability()(lambda: None)


def test_a_class_needs_a_method_and_takes_no_capability_options() -> None:
    with pytest.raises(ConfigError, match=r"has no method with @capability"):
        register_agent()(type("Empty", (), {}))
    for options in ({"idempotent": True}, {"timeout": "heavy"}, {"max_concurrency": 3}):
        with pytest.raises(ConfigError, match="belong on its methods"):
            register_agent(**options)(KnowledgeAgent)
    with pytest.raises(ConfigError, match="belong on its methods"):
        register_agent("a.b.v1")(KnowledgeAgent)


def test_decorating_twice_is_refused() -> None:
    @register_agent("a.b.v1")
    def handler() -> None: ...

    with pytest.raises(ConfigError, match="decorated twice"):
        register_agent("a.b.v2")(handler)


# --- what a client may be given --------------------------------------------------------------------------


@pytest.mark.parametrize("thing", [lambda: None, object(), int, 3, "retrieve", None])
def test_an_undecorated_thing_says_what_to_add(thing: Any) -> None:
    with pytest.raises(ConfigError, match="add @register_agent"):
        specs_of([thing])


@pytest.mark.parametrize("handlers", ["abc", 3, None, retrieve])
def test_handlers_must_be_a_list(handlers: Any) -> None:
    with pytest.raises(ConfigError, match="must be a list"):
        specs_of(handlers)


def test_two_handlers_for_one_name_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"two handlers answer for knowledge\.retrieve\.v1"):
        specs_of([retrieve, retrieve])


def test_a_soft_alias_may_not_meet_another_alias_or_a_real_version() -> None:
    def make(name: str, *aliases: str) -> Any:
        @register_agent(name, soft_aliases=aliases)
        def handler() -> None: ...

        return handler

    assert specs_of([make("a.b.v2", "v1")])[0].info.soft_aliases == ("v1",)
    with pytest.raises(ConfigError, match=r"two handlers answer for a\.b\.v1"):
        specs_of([make("a.b.v2", "v1"), make("a.b.v3", "v1")])
    with pytest.raises(ConfigError, match=r"two handlers answer for a\.b\.v1"):
        specs_of([make("a.b.v2", "v1"), make("a.b.v1")])


def test_agent_level_data_is_merged_and_a_clash_is_refused() -> None:
    def make(capability_name: str, **options: Any) -> Any:
        @register_agent(capability_name, **options)
        def handler() -> None: ...

        return handler

    one = make("a.b.v1", name="kb", weight=2, metadata={"team": "kb"}, version="1.10.0")
    two = make("a.c.v1", metadata={"tier": "gold"}, version="1.9.0")
    for spec in specs_of([one, two]):
        assert (spec.agent_name, spec.weight, spec.agent_version) == ("kb", 2.0, "1.10.0")
        assert spec.metadata == {"team": "kb", "tier": "gold"}
    for options in ({"name": "other"}, {"weight": 3}, {"metadata": {"team": "other"}}):
        with pytest.raises(ConfigError, match="handlers of one agent disagree on"):
            specs_of([one, make("a.d.v1", **options)])


def test_no_handlers_is_no_error() -> None:
    assert specs_of([]) == ()
