"""What a handler takes and returns, read from its type hints: schemas, and values in and out."""

from __future__ import annotations

import difflib
import hashlib
import inspect
import json
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Annotated, Any, NotRequired, Union, get_args, get_origin, get_type_hints

import pydantic_core
from pydantic import BaseModel, ConfigDict, PydanticUserError, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo
from typing_extensions import TypedDict, is_typeddict

from agent_reach import codec
from agent_reach.context import CallContext
from agent_reach.errors import ConfigError, InvalidPayload, InvalidReply
from agent_reach.model import problems_of

__all__ = ["Signature", "label", "schema_hash"]

# pydantic's default turns NaN into null; a constant stays NaN, which the codec then refuses.
_STRICT_NAN = ConfigDict(ser_json_inf_nan="constants")
# How far down the part of a result that can't be encoded is looked for.
_DEEPEST = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Signature:
    """How a payload becomes arguments and a result becomes JSON.

    Keys bind to parameters by name and unknown keys are refused, for they are most often misspelt;
    `**kwargs` takes them. A handler with one parameter, a model or a mapping, takes the payload whole.
    """

    input_schema: Mapping[str, Any]
    output_schema: Mapping[str, Any]
    whole: str | None
    names: tuple[str, ...]
    contexts: tuple[str, ...]
    arguments: TypeAdapter[Any]
    extras: TypeAdapter[Any] | None
    result: TypeAdapter[Any]

    @classmethod
    def read(
        cls, function: Callable[..., Any], *, skip_first: bool, local_names: Mapping[str, Any] | None = None
    ) -> Signature:
        """Read `function`; `skip_first` leaves out `self` or `cls`, `local_names` helps to find annotations.

        Raises ConfigError for what can't be a handler, NameError for a name in an annotation that isn't
        defined (yet).
        """
        parameters = list(inspect.signature(function).parameters.values())[1 if skip_first else 0 :]
        hints = _hints(function, local_names or {})
        contexts = tuple(p.name for p in parameters if _is_context(hints.get(p.name, Any)))
        named, catch_all = _sort_parameters(function, [p for p in parameters if p.name not in contexts])
        whole = None
        extras: TypeAdapter[Any] | None = None
        if len(named) == 1 and catch_all is None and _is_whole(hints.get(named[0].name, Any)):
            whole = named[0].name
            arguments = _adapter(function, f"parameter {whole!r}", hints[whole])
        else:
            arguments = _arguments_adapter(function, named, hints, open_ended=catch_all is not None)
            if catch_all is not None:
                value = hints.get(catch_all.name, Any)
                extras = _adapter(function, f"parameter **{catch_all.name}", dict[str, value])  # type: ignore[valid-type]
        result = _adapter(function, "the return annotation", hints.get("return", Any), _STRICT_NAN)
        input_schema = _schema(function, arguments, "validation")
        if whole is None:
            input_schema.pop("title", None)
            _add_defaults(input_schema, named)
        return cls(
            input_schema=input_schema,
            output_schema=_schema(function, result, "serialization"),
            whole=whole,
            names=tuple(p.name for p in named),
            contexts=contexts,
            arguments=arguments,
            extras=extras,
            result=result,
        )

    def bind(self, payload: Mapping[str, Any], context: CallContext) -> dict[str, Any]:
        """Turn a payload into keyword arguments. Raises InvalidPayload naming each field and why."""
        try:
            if self.whole is not None:
                arguments = {self.whole: self.arguments.validate_python(payload)}
            else:
                arguments = dict(self.arguments.validate_python(payload))
                if self.extras is not None:
                    taken = tuple((name, "is the call's context") for name in self.contexts if name in payload)
                    if taken:
                        raise _invalid(taken, context)
                    unknown = {key: value for key, value in payload.items() if key not in self.names}
                    arguments |= self.extras.validate_python(unknown)
        except ValidationError as error:
            problems = tuple(self._explain(field, reason) for field, reason in problems_of(error))
            raise _invalid((*self._wrapped(payload), *problems), context) from None
        return arguments | dict.fromkeys(self.contexts, context)

    def encode(self, result: Any) -> bytes:
        """Turn a result into JSON. Raises InvalidReply naming the field that doesn't fit or has no JSON form."""
        try:
            value = self.result.validate_python(result)
        except ValidationError as error:
            told = "; ".join(f"{field}: {reason}" for field, reason in problems_of(error))
            raise InvalidReply(f"the result doesn't fit the handler's return annotation: {told}") from None
        try:
            # warnings="error": a model that was filled past its own types would go out as it is.
            return codec.dumps(self.result.dump_python(value, mode="json", warnings="error"))
        except (ValueError, RecursionError) as error:
            field, reason = _culprit(value, "", str(error))
            raise InvalidReply(f"the result has no JSON form: {field}: {reason}") from error

    def _explain(self, field: str, reason: str) -> tuple[str, str]:
        """Say what an unknown key may have meant."""
        if self.whole is not None or reason != "Extra inputs are not permitted" or "." in field:
            return field, reason
        near = difflib.get_close_matches(field, self.names, n=2, cutoff=0.6)
        hint = (
            f"did you mean {' or '.join(map(repr, near))}?"
            if near
            else f"it takes {', '.join(self.names) or 'none'}"
        )
        return field, f"unknown field; {hint}"

    def _wrapped(self, payload: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
        """Say so if the payload holds the model under the parameter's name, as if keys were bound to parameters."""
        if self.whole is None or list(payload) != [self.whole]:
            return ()
        if self.whole in self.input_schema.get("properties", ()):
            return ()
        kind = self.input_schema.get("title", "the object")
        return ((self.whole, f"send the fields of {kind} directly, not inside {self.whole!r}"),)


def _invalid(problems: tuple[tuple[str, str], ...], context: CallContext) -> InvalidPayload:
    told = "; ".join(f"{field}: {reason}" for field, reason in problems)
    return InvalidPayload(
        f"the payload doesn't fit {context.capability}: {told}",
        problems=problems,
        capability=context.capability,
        request_id=context.request_id,
    )


def schema_hash(input_schema: Mapping[str, Any], output_schema: Mapping[str, Any]) -> str:
    """Return 16 hex digits that are the same for the same contract: titles and descriptions don't count."""
    contract = [_contract(input_schema), _contract(output_schema)]
    text = json.dumps(contract, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode("utf-8", "backslashreplace")).hexdigest()[:16]


def _contract(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_contract(item) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    kept: dict[str, Any] = {}
    for key, value in schema.items():
        if key in ("title", "description", "examples"):
            continue
        if key in ("properties", "$defs", "patternProperties"):
            # Here keys are names, and a field may well be called "title".
            kept[key] = {name: _contract(item) for name, item in value.items()}
        else:
            kept[key] = value if key in ("default", "const", "enum") else _contract(value)
    return kept


def _hints(function: Callable[..., Any], local_names: Mapping[str, Any]) -> dict[str, Any]:
    inner = inspect.unwrap(function)
    # CallContext is often imported for type checkers only; nothing else could be meant by the name.
    known = {"CallContext": CallContext, **getattr(inner, "__globals__", {}), **local_names}
    try:
        return get_type_hints(inner, localns=known, include_extras=True)
    except NameError:
        raise
    except (TypeError, SyntaxError, AttributeError) as error:
        raise ConfigError(f"{label(function)}: a type hint can't be read: {error}") from error


def _sort_parameters(
    function: Callable[..., Any], parameters: list[inspect.Parameter]
) -> tuple[list[inspect.Parameter], inspect.Parameter | None]:
    """Split into named parameters and `**kwargs`; refuse what no payload key can reach."""
    named: list[inspect.Parameter] = []
    catch_all = None
    for parameter in parameters:
        if parameter.kind is parameter.VAR_POSITIONAL:
            raise ConfigError(f"{label(function)}: *{parameter.name} can't be filled from a payload; take a list")
        if parameter.kind is parameter.POSITIONAL_ONLY:
            raise ConfigError(
                f"{label(function)}: parameter {parameter.name!r} is positional-only; payload keys bind by name"
            )
        if isinstance(parameter.default, FieldInfo):
            raise ConfigError(
                f"{label(function)}: write {parameter.name!r} as Annotated[type, Field(...)] = default, so that "
                "the function can also be called directly"
            )
        if parameter.kind is parameter.VAR_KEYWORD:
            catch_all = parameter
        else:
            named.append(parameter)
    return named, catch_all


def _arguments_adapter(
    function: Callable[..., Any], named: list[inspect.Parameter], hints: Mapping[str, Any], *, open_ended: bool
) -> TypeAdapter[Any]:
    """Build the adapter of an object with one key per parameter; what is left out keeps its Python default."""
    shape: dict[str, Any] = {}
    for parameter in named:
        hint = hints.get(parameter.name, Any)
        # One at a time first, so that the message can name the parameter.
        _adapter(function, f"parameter {parameter.name!r}", hint)
        shape[parameter.name] = hint if parameter.default is parameter.empty else NotRequired[hint]
    make: Any = TypedDict  # checkers want a literal where the shape is only known now
    payload = make("Payload", shape)
    payload.__pydantic_config__ = ConfigDict(extra="ignore" if open_ended else "forbid")
    return _adapter(function, "the parameters", payload)


def _adapter(
    function: Callable[..., Any], what: str, hint: Any, config: ConfigDict | None = None
) -> TypeAdapter[Any]:
    try:
        try:
            adapter = TypeAdapter(hint, config=config)
        except PydanticUserError as error:
            if config is None or error.code != "type-adapter-config-unused":
                raise
            adapter = TypeAdapter(hint)  # a model brings its own configuration
        adapter.rebuild(raise_errors=True)
    except NameError:
        raise
    except (PydanticUserError, pydantic_core.SchemaError, TypeError) as error:
        reason = str(error).partition("\n")[0]
        raise ConfigError(f"{label(function)}: {what} has a type that JSON can't carry: {reason}") from error
    return adapter


def _schema(function: Callable[..., Any], adapter: TypeAdapter[Any], mode: Any) -> dict[str, Any]:
    try:
        return adapter.json_schema(mode=mode)
    except PydanticUserError as error:
        reason = str(error).partition("\n")[0]
        raise ConfigError(f"{label(function)}: a type has no JSON schema: {reason}") from error


def _add_defaults(schema: dict[str, Any], named: list[inspect.Parameter]) -> None:
    for parameter in named:
        entry = schema.get("properties", {}).get(parameter.name)
        if entry is None or parameter.default is parameter.empty:
            continue
        try:
            entry["default"] = json.loads(codec.dumps(parameter.default))
        except ValueError:
            continue  # a sentinel object: the field is optional, its default is the handler's own business


def _is_context(hint: Any) -> bool:
    if get_origin(hint) is Annotated:
        return _is_context(get_args(hint)[0])
    if get_origin(hint) in (Union, types.UnionType):
        return any(_is_context(option) for option in get_args(hint))
    return inspect.isclass(hint) and issubclass(hint, CallContext)


def _is_whole(hint: Any) -> bool:
    if get_origin(hint) is Annotated:
        return _is_whole(get_args(hint)[0])
    kind = get_origin(hint) or hint
    return inspect.isclass(kind) and (is_typeddict(kind) or issubclass(kind, BaseModel | Mapping))


def _culprit(value: Any, path: str, reason: str) -> tuple[str, str]:
    """Find the innermost part of `value` that can't be encoded."""
    if isinstance(value, BaseModel):
        value = dict(value)
    elif is_dataclass(value) and not isinstance(value, type):
        value = {field.name: getattr(value, field.name) for field in fields(value)}
    items = (
        value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list | tuple) else ()
    )
    for key, part in items:
        try:
            codec.dumps(part)
        except ValueError as error:
            place = f"{path}.{key}" if path else str(key)
            # A value that holds itself has no innermost part.
            return (place, str(error)) if place.count(".") > _DEEPEST else _culprit(part, place, str(error))
    return path or "(whole)", reason


def label(thing: Any) -> str:
    """What to call a function or class in a message."""
    return str(getattr(thing, "__qualname__", None) or repr(thing))
