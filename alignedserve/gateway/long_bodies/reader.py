"""Sends long bodies to the process that reads them."""

from alignedserve.api.openai.schemas.ignored_fields import IgnoredFields
from alignedserve.gateway.long_bodies.messages import Answer, Kind, NotRead, Order, ReadBody, Refusal, decode_outcome
from alignedserve.gateway.long_bodies.messages import encode as encoded
from alignedserve.gateway.services import Services


async def read_long(
    kind: Kind, raw: bytes, services: Services, ignored: IgnoredFields | None
) -> ReadBody | Answer | None:
    """Return what was read; None: only this process can read it. Raises InvalidRequest, Overloaded.

    `ignored`: gets the fields that are ignored; None: they are refused.
    """
    outcome = decode_outcome(await services.work_process.answer(encoded(_order(kind, services)), raw))
    if isinstance(outcome, NotRead):
        return None
    if ignored is not None:
        for name in outcome.ignored:
            ignored.add(name)
    if isinstance(outcome, Refusal):
        raise outcome.error()
    return outcome


def _order(kind: Kind, services: Services) -> Order:
    models = services.models
    loaded = tuple(model.card for model in models.all if model.services is not None)
    places = {card.name: place for place, card in enumerate(loaded)}
    bases = {card.name: models.base_of(card.name) for card in models.cards}
    return Order(kind, services.config, loaded, {name: places[base] for name, base in bases.items() if base in places})
