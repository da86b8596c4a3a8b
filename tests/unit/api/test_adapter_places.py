"""How many adapters keys may have loaded: one leaves places to others, but for keys that see what all use."""

import pytest

from alignedserve.api.models.model_services import check_room
from alignedserve.core.errors import InvalidRequest
from alignedserve.keys.entry import ANYONE, NAMED, KeyEntry
from alignedserve.runtime.lora.loaded_adapters import AdapterChange, Changes

OWN = KeyEntry("team-a", f"{NAMED}team-a")
OTHER = KeyEntry("team-b", f"{NAMED}team-b")
OPERATOR = KeyEntry("operator", f"{NAMED}operator", may_see_usage=True)


def loaded(count: int, owner: str, *, is_loaded: bool = True) -> Changes:
    names = (f"{owner}-{index}" for index in range(count))
    return {name: AdapterChange(name, "/adapters/x", b"", is_loaded=is_loaded, owner=owner) for name in names}


def test_a_key_has_a_quarter_of_the_places_and_others_have_the_rest() -> None:
    full = loaded(250, OWN.owner)
    with pytest.raises(InvalidRequest, match="The key team-a has 250 adapters loaded, and may have no more"):
        check_room(full, "one-more", OWN)
    check_room(full, "one-more", OTHER)
    check_room(full, f"{OWN.owner}-0", OWN)  # it takes the place of itself


def test_what_was_unloaded_takes_no_place() -> None:
    check_room(loaded(249, OWN.owner) | loaded(900, OTHER.owner, is_loaded=False), "one-more", OWN)


@pytest.mark.parametrize("key", [OPERATOR, ANYONE])
def test_who_sees_all_may_load_until_every_place_is_taken(key: KeyEntry) -> None:
    check_room(loaded(999, key.owner), "one-more", key)
    full = loaded(750, key.owner) | loaded(250, OWN.owner)
    with pytest.raises(InvalidRequest, match="At most 1000 adapters can be loaded"):
        check_room(full, "one-more", key)
    check_room(full, f"{OWN.owner}-0", key)
