"""The hardware that a plan may use: `4x h100 @2.5, 8x a100-80g @1.2`."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from alignedserve.core.errors import ConfigError
from alignedserve.costmodel.hardware import HARDWARE
from lab.costmodel.choice import FITTED

RECORDED = "recorded"  # the machine of a recorded run
MAX_COUNT = 1024
_OFFER = re.compile(r"(?:(\d{1,9})\s*x\s+|(\d{1,9})x)?([^\s@]+)(?:\s*@\s*([0-9]*\.?[0-9]+))?")


@dataclass(frozen=True, slots=True)
class Offer:
    """Accelerators of one kind: as many as a plan may use at most."""

    name: str  # of an accelerator, `fitted:FILE` or RECORDED
    count: int
    price_per_hour: float | None = None  # of one

    @property
    def label(self) -> str:
        """Return its name in reports: of a measured machine, that of its file."""
        return self.name.rpartition("/")[2].removeprefix(FITTED)

    @property
    def is_profiled(self) -> bool:
        """Return whether it is a machine that was measured: its model and degree of parallelism are given."""
        return self.name.startswith(FITTED) or self.name == RECORDED


def parse_hardware(text: str) -> tuple[Offer, ...]:
    """Parse the list. Raises ConfigError; where an accelerator is unknown, the error lists the known ones."""
    offers = tuple(_parse_offer(part.strip()) for part in text.split(",") if part.strip())
    if not offers:
        raise ConfigError("--hardware is empty: write for example '4x h100 @2.5, 8x a100-80g @1.2'")
    names = [offer.label for offer in offers]
    if len(set(names)) < len(names):
        raise ConfigError(f"--hardware {text!r} names one kind twice")
    _check_prices(offers)
    return offers


def _parse_offer(text: str) -> Offer:
    match = _OFFER.fullmatch(text)
    if match is None:
        raise ConfigError(
            f"--hardware {text[:80]!r}: write COUNTx NAME @PRICE, such as '4x h100 @2.5'; @PRICE is optional"
        )
    count, price = int(match[1] or match[2] or 1), None if match[4] is None else float(match[4])
    if not 1 <= count <= MAX_COUNT:
        raise ConfigError(f"--hardware {text!r}: the count must be between 1 and {MAX_COUNT}")
    if price is not None and not 0.0 < price <= 1e6:
        raise ConfigError(f"--hardware {text!r}: the price per hour must be above 0")
    name = match[3]
    if name not in HARDWARE and name != RECORDED and not name.startswith(FITTED):
        raise ConfigError(
            f"hardware {name!r} is none of {', '.join(HARDWARE)}. For another machine run `alignedserve profile MODEL "
            f"--output FILE` on it, and write {FITTED}FILE in place of its name."
        )
    return Offer(name, count, price)


def _check_prices(offers: Sequence[Offer]) -> None:
    unpriced = [offer.name for offer in offers if offer.price_per_hour is None]
    if unpriced and len(offers) > 1:
        raise ConfigError(
            f"--hardware: several kinds are compared by their prices, and {unpriced[0]} has none (@PRICE)"
        )
