"""Every family of decoders that is read. A family of known parts is a row, beside its like."""

from alignedserve.runtime.model.families.dense import DENSE
from alignedserve.runtime.model.families.form import FamilyForm
from alignedserve.runtime.model.families.hybrids import HYBRIDS
from alignedserve.runtime.model.families.mixtures import MIXTURES

FAMILIES: dict[str, FamilyForm] = {**DENSE, **MIXTURES, **HYBRIDS}
