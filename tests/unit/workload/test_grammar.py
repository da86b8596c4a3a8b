import pytest

from alignedserve.core.errors import ConfigError
from alignedserve.core.request import RequestClass
from lab.workload.distributions import ValueDistribution, constant
from lab.workload.grammar import PredictionKind, PredictionModel, parse_classes
from tests.support.marks import each


def test_two_classes_with_objectives() -> None:
    chat, documents = parse_classes(
        "rt: rate=2, cv=1.5, prompt=lognormal(100,300), output=60, ttft=1, tpot=0.1;"
        "be: outstanding=4, prompt=800, output=100, deadline=60, tier=flex"
    )
    assert (chat.name, chat.rate, chat.cv, chat.ttft_s, chat.tpot_s) == ("rt", 2.0, 1.5, constant(1.0), constant(0.1))
    assert (chat.prompt, chat.request_class) == (ValueDistribution("lognormal", (100.0, 300.0)), RequestClass.REAL_TIME)
    assert (documents.outstanding, documents.deadline_s, documents.tier) == (4, constant(60.0), "flex")
    assert (documents.rate, documents.request_class) == (None, RequestClass.BEST_EFFORT)


def test_a_name_alone_is_a_source_of_lengths() -> None:
    (spec,) = parse_classes("sharegpt, rate=3, max_total=2048, max_prompt=1024, predict=error(0.5), max_tokens=2048")
    assert (spec.name, spec.source, spec.max_tokens) == ("class1", "sharegpt", 2048)
    assert (spec.limits.max_total, spec.limits.max_prompt, spec.limits.max_output) == (2048, 1024, None)
    assert spec.prediction == PredictionModel(PredictionKind.NOISY, 0.5)


def test_classes_count_for_tenants_by_weight() -> None:
    heavy, light, nobodys = parse_classes(
        "a: sharegpt, outstanding=9, tenant=team-a, weight=2; b: sharegpt, rate=1, tenant=team-b; c: sharegpt, rate=1"
    )
    assert [(one.tenant, one.weight) for one in (heavy, light, nobodys)] == [
        ("team-a", 2.0),
        ("team-b", 1.0),
        ("", 1.0),
    ]


def test_recorded_arrivals() -> None:
    (spec,) = parse_classes("x: ./night.csv, arrivals=recorded, start=60, rate=5, repeat=yes, class=be, priority=-2")
    assert (spec.source, spec.arrivals, spec.start_s, spec.rate) == ("./night.csv", "recorded", 60.0, 5.0)
    assert (spec.is_repeated, spec.request_class, spec.priority) == (True, RequestClass.BEST_EFFORT, -2)


@each(
    ("specification", "complaint"),
    [
        ("", "empty"),
        ("rate=2,output=3", "prompt= is missing"),
        ("prompt=2,output=3", "rate="),
        ("rate=1,outstanding=2,prompt=2,output=3", "rate="),
        ("wave=1,outstanding=2,prompt=2,output=3", "wave="),
        ("rate=x,prompt=2,output=3", "rate: 'x' is not a number"),
        ("rate=inf,prompt=2,output=3", "not finite"),
        ("rate=0,prompt=2,output=3", "rate must be above 0"),
        ("outstanding=1.5,prompt=2,output=3", "whole number"),
        ("rate=1,prompt=gauss(1,2),output=3", "prompt: .*distributions are"),
        ("rate=1,prompt=uniform(5),output=3", "takes 2"),
        ("rate=1,prompt=uniform(5,2),output=3", "must not exceed"),
        ("rate=1,prompt=-5,output=3", "above 0"),
        ("rate=1,prompt=2,output=3,name=x", "is not one of"),
        ("rate=1,rate=2,prompt=2,output=3", "rate= stands there twice"),
        ("rate=1,prompt=2,output=3,", "neither key=value"),
        ("a: rate=1,prompt=2,output=3; a: rate=1,prompt=2,output=3", "same name"),
        ("all: rate=1,prompt=2,output=3", "no class can be called 'all'"),
        ("sharegpt, rate=1, ttft=1s", "workload class1: ttft: '1s' is not a number"),
        ("share gpt, rate=1", "neither key=value nor the name"),
        ("rt: sharegpt, rate=1, class=fast", "workload rt: class must be rt or be"),
        ("be: sharegpt, rate=1, be_share=0.5", "be_share= has no meaning"),
        ("sharegpt, rate=1, be_share=2", "between 0 and 1"),
        ("sharegpt, rate=1, start=5", "start= has no meaning"),
        ("sharegpt, rate=1, repeat=yes", "repeat= has no meaning"),
        ("sharegpt, rate=1, think=2", "think= has no meaning without turns="),
        ("sharegpt, rate=1, instructions=2", "instructions= has no meaning without instruction="),
        ("sharegpt, rate=1, turns=65", "turns must be a whole number from 1 to 64"),
        ("sharegpt, rate=1, turns=2, think=-1", "think must not be negative"),
        ("mooncake, arrivals=recorded, turns=2", "turns= has no meaning"),
        ("sharegpt, outstanding=1, cv=2", "cv= has no meaning beside outstanding"),
        ("azure_conv, arrivals=recorded, cv=2", "cv= has no meaning"),
        ("arrivals=recorded, prompt=1, output=1", "needs the name of a trace"),
        (
            "sharegpt, rate=1, max_tokens=some",
            "max_tokens: 'some' is neither a whole number nor one of context, pow",
        ),
        ("sharegpt, rate=1, max_tokens=1.5", "max_tokens: '1.5' is neither"),
        ("sharegpt, rate=1, max_tokens=0", "max_tokens: '0' is neither"),
        ("sharegpt, rate=1, predict=good", "predictions are exact, mean or error"),
        ("sharegpt, rate=1, predict=error(9)", "between 0 and 5"),
        ("sharegpt, rate=1, priority=high", "priority: 'high' is not a whole number"),
        ("sharegpt, rate=1, priority=1001", "priority must be a whole number from -1000 to 1000"),
        ("sharegpt, rate=1, turns=2, think=1e9", "think must be at most 3.16224e"),
        ("sharegpt, rate=1, repeat=maybe", "repeat must be yes or no"),
        ("sharegpt, rate=1, max_total=0", "max_total must be above 0"),
        ("sharegpt, rate=1, tenant=", "tenant must be a name of at most 256 characters"),
        (f"sharegpt, rate=1, tenant={'x' * 257}", "tenant must be a name of at most 256 characters"),
        ("sharegpt, rate=1, weight=2", "weight= has no meaning without tenant="),
        ("sharegpt, rate=1, tenant=a, weight=0", "weight must be above 0"),
        ("sharegpt, rate=1, tenant=a, weight=2e6", "weight must be at most"),
        ("sharegpt, rate=1, tenant=a, weight=much", "weight: 'much' is not a number"),
    ],
)
def test_wrong_specification_says_what_is_wrong(specification: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        parse_classes(specification)
