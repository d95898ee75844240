"""Capability names: the name is the contract."""

import pytest

from agent_reach.errors import ConfigError
from agent_reach.routing.names import alias_target, check_capability, near_names


@pytest.mark.parametrize("name", ["knowledge.retrieve.v1", "a.b.v0", "ticket.urgent.classify.v12", "a_b.c-d.v3"])
def test_a_name_that_keeps_the_rule_is_taken(name: str) -> None:
    assert check_capability(name) == name


@pytest.mark.parametrize(
    "name",
    ["", "knowledge", "knowledge.v1", "knowledge.retrieve", "knowledge.retrieve.v1beta", "knowledge.retrieve.v01",
     "Knowledge.retrieve.v1", "knowledge..v1", "knowledge.retrieve.v1/../x", "wissen.überblick.v1", "a.b.v1\n",
     "a" * 200 + ".b.v1", None, 7, "__class__.x.v1"],
)  # fmt: skip
def test_a_name_that_breaks_the_rule_is_refused_with_the_rule(name: object) -> None:
    with pytest.raises(ConfigError, match=r"domain\.action\.vN"):
        check_capability(name)


@pytest.mark.parametrize(
    ("wrong", "mended"),
    [("Knowledge.Retrieve.V1", "knowledge.retrieve.v1"), ("knowledge.retrieve", "knowledge.retrieve.v1")],
)
def test_a_near_miss_is_mended_in_the_message(wrong: str, mended: str) -> None:
    with pytest.raises(ConfigError, match=f"Did you mean '{mended}'"):
        check_capability(wrong)


def test_what_lacks_an_action_gets_no_absurd_advice() -> None:
    with pytest.raises(ConfigError) as caught:
        check_capability("price.v1")
    assert "Did you mean" not in str(caught.value)


def test_an_alias_is_another_version_of_the_same_name() -> None:
    assert alias_target("knowledge.retrieve.v2", "v1") == "knowledge.retrieve.v1"
    for wrong in ["v2", "knowledge.retrieve.v1", "1", ""]:
        with pytest.raises(ConfigError, match="soft alias"):
            alias_target("knowledge.retrieve.v2", wrong)


def test_near_names_put_other_versions_first() -> None:
    offered = ["knowledge.retrieve.v2", "knowledge.retrieves.v1", "profile.read.v1"]
    assert near_names("knowledge.retrieve.v1", offered) == ("knowledge.retrieve.v2", "knowledge.retrieves.v1")
    assert near_names("weather.report.v1", offered) == ()


def test_of_ten_thousand_names_only_those_of_the_domain_are_compared() -> None:
    offered = [f"domain{n}.act.v1" for n in range(10_000)] + ["knowledge.retrieve.v2", "knowledge.retrieves.v1"]
    assert near_names("knowledge.retrieve.v1", offered) == ("knowledge.retrieve.v2", "knowledge.retrieves.v1")
