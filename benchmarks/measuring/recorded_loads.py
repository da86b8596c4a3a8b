"""Loads that are put on a live system and recorded, and what of them is compared with their simulation."""

from dataclasses import asdict, dataclass

RT = "rt: rate={rate}, prompt={prompt}, output=exponential({output}), max_output=200, ttft=0.4, tpot=0.2"
BE = "be: outstanding={outstanding}, prompt=uniform({shortest},{longest}), output=uniform(32,128), tier=flex"
FITTED = "fit"
THROUGHPUT, TIMES = 0.05, 0.10  # what the ratios of throughput and of times may be off
JUDGED = ("requests/s", "ttft p50, s", "ttft p90, s", "tbt p50, s", "tbt p90, s")


@dataclass(frozen=True, slots=True)
class RecordedLoad:
    """One load: real-time requests at a rate, best-effort ones in a closed loop."""

    rate: float
    prompt: str
    output: int
    outstanding: int
    shortest: int
    longest: int

    @property
    def line(self) -> str:
        return "; ".join(part.format(**asdict(self)) for part in (RT, BE))


LOADS = {
    FITTED: RecordedLoad(1.5, "lognormal(100,300)", 60, 4, 200, 500),
    "rate": RecordedLoad(2.25, "lognormal(100,300)", 60, 2, 200, 500),
    "lengths": RecordedLoad(1.0, "lognormal(200,500)", 30, 3, 400, 700),
}
