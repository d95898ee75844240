"""Wire and registry records (DESIGN: wire protocol reach/1, registry layout schema 1).

Unknown fields are ignored in both directions, so that older and newer agents understand each other.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal
from urllib.parse import SplitResult, urlsplit

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, field_validator

from agent_reach import codec

__all__ = [
    "MAX_RECORD_BYTES",
    "PING",
    "PROTOCOL",
    "AgentInfo",
    "CapabilityInfo",
    "Endpoint",
    "Envelope",
    "ErrorInfo",
    "LoadReport",
    "ReplyEnvelope",
    "check_agent_id",
    "check_namespace",
    "check_url",
    "problems_of",
]

PROTOCOL: Literal["reach/1"] = "reach/1"
# Answered by every agent, offered by none: is this the process that the record means?
PING = "reach.ping.v1"
# Every watcher receives every record: 10,000 agents of 1 KB are a 10 MB list, of 16 KB already 160 MB.
MAX_RECORD_BYTES = 16 * 1024

_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


def check_agent_id(value: str) -> str:
    """Return `value` if it can name an instance, else raise ValueError with the rule."""
    return _check_id("agent id", value)


def check_namespace(value: str) -> str:
    """Return `value` if it can name a namespace, else raise ValueError with the rule."""
    return _check_id("namespace", value)


def _check_id(what: str, value: str) -> str:
    if not isinstance(value, str) or not _ID.fullmatch(value) or ".." in value:
        raise ValueError(
            f"{what} {value!r} must be 1 to 128 of A-Z a-z 0-9 . _ -, start with a letter or digit, "
            "and hold no '..'"
        )
    return value


def check_url(url: str) -> str:
    """Return `url` without its trailing slash if peers may dial it, else raise ValueError with the reason.

    http and https only; no user info, query, fragment or dot segments; not the unspecified address, not a
    link-local one (cloud metadata services live there), not multicast; IPv6 in brackets.
    """
    if not url.isascii() or not url.isprintable() or any(c in url for c in " \\<>\"'`{}|^"):
        raise ValueError(f"url {url!r} must be printable ASCII without blanks, quotes or backslashes")
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise ValueError(f"url {url!r} is not a URL: {error} (an IPv6 address needs brackets)") from error
    if parts.scheme not in ("http", "https"):
        raise ValueError(f"url {url!r} must start with http:// or https://")
    if parts.username is not None or parts.password is not None:
        raise ValueError("url must not carry user info: records are public")
    if not parts.hostname or port == 0:
        raise ValueError(f"url {url!r} must name a host and a port other than 0 (IPv6 needs brackets)")
    if parts.query or parts.fragment or ".." in parts.path.split("/") or "%2e" in parts.path.lower():
        raise ValueError(f"url {url!r} must have no query, no fragment and no dot segments")
    _check_host(url, parts)
    return url.rstrip("/")


def _check_host(url: str, parts: SplitResult) -> None:
    host = parts.hostname or ""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        # inet_aton reads '0', '0x7f.1' and '2852039166' as addresses; a host name that looks so hides one.
        if re.fullmatch(r"[0-9a-fx.]*", host) and re.fullmatch(r"(0x)?[0-9a-f]+", host.rsplit(".", 1)[-1]):
            raise ValueError(f"url {url!r}: write the address {host!r} in its plain form") from None
        return
    mapped = getattr(address, "ipv4_mapped", None)
    address = mapped or address
    if address.is_unspecified or address.is_link_local or address.is_multicast:
        raise ValueError(
            f"url {url!r}: {host} is no address that peers may dial; advertise the address they reach you by"
        )


# Enough to mend a payload by; a list of a million wrong items must not come back as a million reasons.
_MOST_PROBLEMS = 20
# pydantic can only list all of them at once, at 3 us each.
_MOST_LISTED = 1000


def problems_of(error: ValidationError) -> tuple[tuple[str, str], ...]:
    """List a pydantic error as (field, reason) pairs, the first 20, without the values: they may be secrets."""
    count = error.error_count()
    if count > _MOST_LISTED:
        return (("(whole)", f"{count} problems, too many to list"),)
    found = error.errors(include_url=False, include_context=False, include_input=False)
    told = [(".".join(map(str, e["loc"])) or "(whole)", e["msg"]) for e in found[:_MOST_PROBLEMS]]
    if len(found) > _MOST_PROBLEMS:
        told.append(("(more)", f"and {len(found) - _MOST_PROBLEMS} more problems"))
    return tuple(told)


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore", populate_by_name=True, allow_inf_nan=False)


class LoadReport(_Record):
    """What an instance says of itself in each answer: calls running, waiting, and its limit (None: no limit)."""

    in_flight: int = 0
    queued: int = 0
    max_concurrency: int | None = None


class Endpoint(_Record):
    """Where an instance is dialed. `local` is an agent in the caller's own process (memory registry only)."""

    protocol: Literal["http", "local"] = "http"
    url: str

    @field_validator("url")
    @classmethod
    def _dialable(cls, url: str) -> str:
        return url if url.startswith("local://") else check_url(url)


class CapabilityInfo(_Record):
    """One capability of one instance, as announced.

    `timeout` is a tier (`light`, `interactive`, `write`, `heavy`, `long`) or seconds for one attempt.
    """

    name: str = Field(max_length=200)
    version: str = "1.0.0"
    description: str = ""
    idempotent: bool = False
    timeout: Annotated[float, Field(gt=0, le=86_400)] | str = "interactive"
    max_concurrency: int | None = Field(default=None, gt=0)
    streaming: bool = False
    soft_aliases: tuple[str, ...] = ()
    schema_hash: str | None = None


class AgentInfo(_Record):
    """One running instance, as written to the registry. `incarnation` is new at every start."""

    schema_version: Literal[1] = Field(default=1, alias="schema")
    agent_id: Annotated[str, AfterValidator(check_agent_id)]
    incarnation: str = Field(min_length=1, max_length=64)
    name: str
    namespace: Annotated[str, AfterValidator(check_namespace)]
    version: str = "1.0.0"
    owner: str | None = None
    endpoint: Endpoint
    health_check_url: str | None = None
    zone: str | None = None
    weight: float = Field(default=1.0, gt=0)
    max_concurrency: int | None = Field(default=None, gt=0)
    registered_at: float = 0.0
    metadata: Mapping[str, str] = Field(default_factory=dict)
    capabilities: tuple[CapabilityInfo, ...] = ()

    def to_bytes(self) -> bytes:
        """Encode for the registry. Raises ValueError past `MAX_RECORD_BYTES`."""
        body = codec.dumps(self.model_dump(mode="json", by_alias=True, exclude_none=True))
        if len(body) > MAX_RECORD_BYTES:
            raise ValueError(
                f"the record of {self.agent_id} is {len(body)} bytes, the limit is {MAX_RECORD_BYTES}: "
                "shorten descriptions and metadata"
            )
        return body

    @classmethod
    def from_bytes(cls, body: bytes) -> AgentInfo:
        """Decode a registry record. Raises ValueError with the fields at fault, never their values."""
        if len(body) > MAX_RECORD_BYTES:
            raise ValueError(f"record of {len(body)} bytes, the limit is {MAX_RECORD_BYTES}")
        try:
            return cls.model_validate_json(body)
        except ValidationError as error:
            reasons = "; ".join(f"{field}: {reason}" for field, reason in problems_of(error))
            raise ValueError(f"unreadable record: {reasons}") from None


class Envelope(_Record):
    """A request on the wire; DESIGN section 3 gives each field's meaning."""

    protocol: Literal["reach/1"] = PROTOCOL
    request_id: str = Field(min_length=1, max_length=128)
    trace_id: str = Field(pattern=r"^[0-9a-f]{32}$")
    from_agent: str = Field(max_length=128)
    namespace: str
    target_capability: str = Field(max_length=200)
    target_agent: str
    payload: dict[str, Any]
    timestamp: float = 0.0
    ttl_ms: int = Field(ge=0)
    attempt: int = Field(default=1, ge=1)
    hop: int = Field(default=1, ge=1)
    retry_allowance: int = Field(default=0, ge=0)
    idempotency_key: str | None = Field(default=None, max_length=256)
    context_id: str | None = Field(default=None, max_length=256)
    metadata: dict[str, str] = Field(default_factory=dict)


class ErrorInfo(_Record):
    """Why a request failed. `executed` False is a promise that nothing ran."""

    type: str
    message: str
    retryable: bool = False
    executed: bool = True
    # A day: no call lasts as long, and a number without bound would overflow a clock.
    retry_after_ms: Annotated[int, Field(ge=0), AfterValidator(lambda ms: min(ms, 86_400_000))] | None = None
    problems: tuple[tuple[str, str], ...] = ()


class ReplyEnvelope(_Record):
    """An answer on the wire. `code` 0 is success, else the HTTP status; then `error` says why."""

    code: int
    data: Any = None
    response_to: str | None = None
    agent_id: str
    deprecated: bool = False
    load: LoadReport | None = None
    state: str = "accepting"
    # How many of the retries that came along are left.
    retry_allowance: int | None = Field(default=None, ge=0)
    error: ErrorInfo | None = None
