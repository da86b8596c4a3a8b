"""Why `aligned_slo` is worse than a paper's policy in rows of docs/experiments/README.md."""

from collections.abc import Mapping

from experiments.pages.record import bold

NOT_LOOKED_INTO = bold("Not looked into.")

_LARGER_BATCHES = (
    "Nothing bounds an iteration where no request has an objective; its batches are larger and more mixed than"
    " `aligned`'s ([both](alignedserve.md#the-headline-opt-27b-95--short))."
)
_DEADLINES = (
    "In an overload of thirty times it gives up long documents, the only requests with deadlines, for short requests"
    " ([more](accelgen.md#figure-11-opt-13b-8-requestss-three-seeds-of-100-s))."
)
_MORE_REQUESTS = (
    "It ends twice as many requests with fewer tokens each, and computes 28 % more prompt tokens, 19 % more in all"
    " ([more](accelgen.md#other-models-other-rates-bursts-of-50-and-200-s))."
)
_LONG_ITERATIONS = (
    "Its iterations last about as long as the shortest objective or longer, which then bounds nothing"
    " ([more](accelgen.md#other-models-other-rates-bursts-of-50-and-200-s))."
)
_SHORT_FIRST = (
    "Without objectives the request with far less left to do goes first, so long answers pay for the mean"
    " ([more](alise.md#the-record-bursts-of-15-to-120-s))."
)
_BURSTS = (
    "A burst is where a policy must know which answers are short; of three seeds with one burst each it leads in two"
    " ([more](apt_serve.md#opt-13b-at-the-papers-rates-bursts-of-300-requests))."
)
WHY: Mapping[str, str] = {  # by the names of the rows
    "the same, p99 TBT": _LARGER_BATCHES,
    "the same: iteration-level SLOs, deadlines held": _DEADLINES,
    "AccelGen, tokens/s: Llama-2-13B, OPT-175B, Llama-3-70B": _MORE_REQUESTS,
    "the same, iteration-level SLOs": _LONG_ITERATIONS,
    "the same, p99 of the response, s": _SHORT_FIRST,
    "Apt-Serve, bursts of 300 (three seeds), ShareGPT 6/s held: CV 1, 5, 10": _BURSTS,
}
