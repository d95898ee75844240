"""The profile agent: knows the customers."""

from __future__ import annotations

from pydantic import BaseModel

from agent_reach import register_agent


class Profile(BaseModel):
    """A customer. `plan` is standard, plus or business."""

    customer_id: str
    name: str
    plan: str
    country: str
    customer_since: int


# (name, plan, country, since); made up.
_ROWS = (
    ("Ada Moreau", "standard", "France", 2019),
    ("Bilal Khan", "plus", "United Kingdom", 2021),
    ("Chiara Bianchi", "standard", "Italy", 2022),
    ("Dmitri Petrov", "business", "Estonia", 2017),
    ("Elif Aydin", "plus", "Germany", 2020),
    ("Fergus Byrne", "standard", "Ireland", 2018),
    ("Greta Lindqvist", "standard", "Sweden", 2023),
    ("Hugo Carvalho", "business", "Portugal", 2016),
    ("Ines Vidal", "plus", "Spain", 2024),
    ("Jonas Weber", "standard", "Austria", 2015),
)
CUSTOMERS = {
    f"C{number:03}": Profile(
        customer_id=f"C{number:03}", name=name, plan=plan, country=country, customer_since=since
    )
    for number, (name, plan, country, since) in enumerate(_ROWS, 1)
}


@register_agent("profile.read.v1", name="profiles", idempotent=True, timeout="light")
async def read(customer_id: str) -> Profile | None:
    """Look a customer up; none if nobody has that number."""
    return CUSTOMERS.get(customer_id)
