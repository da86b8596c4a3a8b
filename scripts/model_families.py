"""Writes the table of families in docs/models.md from the table in the code: python -m scripts.model_families."""

from collections.abc import Callable, Iterator
from pathlib import Path

from alignedserve.core.json_fields import JsonFields
from alignedserve.runtime.model.decoder.decoder_parts import HeadNormKind, NormKind
from alignedserve.runtime.model.families import form as states
from alignedserve.runtime.model.families import readers
from alignedserve.runtime.model.families import readers as gemma
from alignedserve.runtime.model.families.form import FamilyForm
from alignedserve.runtime.model.families.table import FAMILIES
from alignedserve.runtime.model.hf_fields import SharedSizes
from benchmarks.measuring.arguments import parser_of
from benchmarks.measuring.page_tables import put_table

PAGE = Path(__file__).parent.parent / "docs" / "models.md"
_HEAD_NORMS = {
    HeadNormKind.HEADS: "QK norm by head",
    HeadNormKind.ROTATED_HEADS: "QK norm after RoPE",
    HeadNormKind.WHOLE: "QK norm over all heads",
    HeadNormKind.UNSCALED: "QK norm after RoPE",
}


_STATES: dict[Callable[[JsonFields, SharedSizes], states.StateLayers], str] = {
    states.short_convolutions: "short convolutions",
    states.mamba2: "Mamba-2",
    states.nemotron: "Mamba-2",
    states.mamba2_beside: "Mamba-2 beside attention",
    states.delta_rule: "gated delta rule",
    states.mixed_delta_rule: "gated delta rule",
}
_EXTRAS = {
    gemma.gemma3n: "layer embeddings, shared KV, streams",
    gemma.gemma4: "layer embeddings, shared KV, own heads",
}
# What they add to a config is none of the multipliers.
_PLAIN = (readers.lfm2, readers.lfm2_moe, readers.nemotron_h)


def table() -> str:
    """Return the table: families of one title in a row."""
    types: dict[str, list[str]] = {}
    for model_type, form in FAMILIES.items():
        types.setdefault(form.title, []).append(model_type)
    rows = [
        f"| {title} | {', '.join(f'`{one}`' for one in own)} | {', '.join(beyond_llama(FAMILIES[own[0]]))} |"
        for title, own in types.items()
    ]
    return "\n".join(["| family | `model_type` | beyond Llama's decoder |", "|---|---|---|", *rows]) + "\n"


def beyond_llama(form: FamilyForm) -> Iterator[str]:
    """Walk what a family has otherwise than Llama."""
    if form.names.positions:
        yield "learned positions"
    if form.windows.layers is not None:
        yield "chunked attention" if form.has_chunked_windows else "sliding windows"
    if form.unrotated is not None:
        yield "NoPE layers"
    if form.names.interleaves_pairs:
        yield "interleaved RoPE"
    if form.rotated.default != 1.0:
        yield "partial RoPE"
    if form.latent is not None:
        yield "latent attention"
    if form.states is not None:
        yield _STATES[form.states]
    if form.has_attention_gate:
        yield "gated attention"
    if form.has_sinks:
        yield "attention sinks"
    if form.has_caps:
        yield "capped scores and logits"
    if form.head_norm in _HEAD_NORMS:
        yield _HEAD_NORMS[form.head_norm]
    if form.adapt in _EXTRAS:
        yield _EXTRAS[form.adapt]
    if form.experts is not None:
        yield "experts"
    if form.names.router_correction:
        yield "sigmoid routing"
    if form.names.shared_down:
        yield "shared expert"
    if form.names.positions or form.norm not in (NormKind.RMS, NormKind.RMS_PLUS_ONE):
        yield "layer norms"
    if not form.has_input_norms:
        yield "post-norms alone"
    elif form.has_post_norms:
        yield "post-norms too"
    if form.parallel_residual:
        yield "parallel residual"
    if not form.is_gated or form.names.positions:
        yield "no gates"
    if form.adapt is not None and form.adapt not in _PLAIN:
        yield "multipliers"


def with_table(page: str) -> str:
    """Return the page with the table as the code has it now."""
    return put_table(page, "families", table())


def main() -> None:
    """Write it."""
    parser_of(__doc__).parse_args()
    PAGE.write_text(with_table(PAGE.read_text()))


if __name__ == "__main__":
    main()
