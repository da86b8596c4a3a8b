"""Why `aligned_slo` is worse than a paper's policy in rows of docs/experiments/README.md."""

from collections.abc import Mapping

from experiments.pages.record import bold

NOT_LOOKED_INTO = bold("not looked into")

_STRAGGLERS = (
    "requests of other lengths join a batch where learned costs say that it is for nothing; with one block of threads"
    " per sequence a wave lasts as long as the longest of the batch ([more](alignedserve.md#aligned_slo))"
)
_BURST = (
    "a burst is where a policy must know which answers are short and what an iteration of many prompts takes, and it is"
    " told neither; one seed has one burst ([more](apt_serve.md#opt-13b-at-the-papers-rates-the-record))"
)
_BEST_EFFORT = (
    "first tokens in time, and shorter gaps, are paid for in best-effort work ([more](bros.md#why-they-differ))"
)
_LONG_ITERATIONS = (
    "its iterations are longer than the shortest objective, which then bounds nothing"
    " ([more](accelgen.md#other-models-other-rates))"
)
WHY: Mapping[str, str] = {  # by the names of the rows
    "AlignedServe, headline (three seeds), tokens/s: one block per sequence, balanced": _STRAGGLERS,
    "the same, p99 TBT": (
        "nothing bounds an iteration where no request has an objective, and its batches hold more requests, and more"
        " unlike ones, than those of `aligned` ([batch](alignedserve.md#the-headline-opt-27b-95--short))"
    ),
    "AlignedServe, eight accelerators: tokens/s, p99 TBT": f"{_STRAGGLERS}; one seed",
    "AlignedServe, tokens/s: OPT-6.7B, 13B, 30B": f"{_STRAGGLERS}; one seed",
    "AlignedServe, tokens/s, one block: ShareGPT, LongBench, Azure": f"{_STRAGGLERS}; one seed",
    "BROS, 10/s (three seeds): held, best-effort requests/s": _BEST_EFFORT,
    "the same, best-effort requests/s": _BEST_EFFORT,
    "the same: iteration-level SLOs, deadlines held": (
        "in an overload of thirty times it gives long documents up, which alone have deadlines, for many short requests"
        " ([more](accelgen.md#figure-11-opt-13b-8-requestss-three-seeds-of-100-s))"
    ),
    "AccelGen, tokens/s: Llama-2-13B, OPT-175B, Llama-3-70B": (
        "it ends more requests, of which each has fewer tokens ([more](accelgen.md#other-models-other-rates))"
    ),
    "the same, iteration-level SLOs": _LONG_ITERATIONS,
    "the same, p99 of the response, s": (
        "without objectives what has far less left to do goes first, so long answers pay for the mean"
        " ([more](alise.md#the-record))"
    ),
    "Apt-Serve, ShareGPT 6/s held: CV 1 (three seeds), 5, 10": _BURST,
    "Apt-Serve, LongBench 1.5/s, likewise": f"{_BURST}; at another variation it is ahead by as much",
    "Apt-Serve, HumanEval 9/s: CV 1, 5, 10": _BURST,
}
