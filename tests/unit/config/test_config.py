"""The configuration: file, overrides, sizes; every refusal is a ConfigError that names what is wrong."""

from pathlib import Path

import msgspec
import pytest

from alignedserve.config.environment import api_keys, run_root, state_root
from alignedserve.config.loading import MAX_CONFIG_BYTES, load_config, parse_size
from alignedserve.config.sections import MIB, BatchingConfig, ClusterConfig, Topology
from alignedserve.config.unset_sizes import DefaultSize, with_fixed_sizes
from alignedserve.core.errors import ConfigError
from tests.support.marks import each


def written(folder: Path, text: str) -> Path:
    path = folder / "cluster.yaml"
    path.write_text(text)
    return path


def test_without_a_file_everything_has_its_default() -> None:
    assert load_config(None) == ClusterConfig()


@pytest.mark.parametrize("text", ["", "# nothing\n", "---\n"])
def test_an_empty_file_is_all_defaults(tmp_path: Path, text: str) -> None:
    assert load_config(written(tmp_path, text)) == ClusterConfig()


@each("more", [(), ("pool.memory_bytes=null",)])
def test_sizes_that_are_unset_say_so_and_can_be_fixed(more: tuple[str, ...]) -> None:
    config = load_config(None, ["decode.kv_cache_bytes=256MiB", *more])
    assert isinstance(config.pool.memory_bytes, DefaultSize)
    assert not isinstance(config.decode.kv_cache_bytes, DefaultSize)
    assert config.topology is None
    fixed = with_fixed_sizes(config)
    assert type(fixed.pool.memory_bytes) is int
    assert (fixed.pool, fixed.prefill, fixed.decode) == (config.pool, config.prefill, config.decode)
    assert fixed.topology is None
    assert msgspec.json.decode(msgspec.json.encode(fixed), type=ClusterConfig) == fixed


def test_a_file_sets_what_it_names(tmp_path: Path) -> None:
    text = "topology: colocated\nrouter:\n  prefill_order: fcfs\npool: {memory_bytes: 64MiB, lease_s: 2}\n"
    config = load_config(written(tmp_path, text))
    assert config.topology is Topology.COLOCATED
    assert config.router.prefill_order == "fcfs"
    assert (config.pool.memory_bytes, config.pool.lease_s) == (64 * MIB, 2.0)
    assert config.decode == ClusterConfig().decode


def test_how_batches_are_formed_is_a_section_of_its_own(tmp_path: Path) -> None:
    text = "batching: {policy: density_first, min_requests: 8, max_block_share: 1, starvation_s: 0.5}\n"
    expected = BatchingConfig(policy="density_first", min_requests=8, max_block_share=1.0, starvation_s=0.5)
    assert load_config(written(tmp_path, text)).batching == expected


@each(("policy", "is_aligned"), [("density_first", True), ("fcfs", False)])
def test_only_first_come_first_served_cares_for_no_lengths(policy: str, is_aligned: bool) -> None:
    assert BatchingConfig(policy=policy).is_aligned is is_aligned


def test_there_may_be_no_candidate_buffers() -> None:
    assert load_config(None, ["prefill.candidate_buffer_bytes=0"]).prefill.candidate_buffer_bytes == 0


def test_overrides_go_on_top_of_the_file_and_the_last_one_wins(tmp_path: Path) -> None:
    path = written(tmp_path, "gateway: {port: 9000, host: 0.0.0.0}\n")
    config = load_config(path, ["gateway.port=9001", "gateway.port=9002", "decode.kv_cache_bytes=1GiB"])
    assert (config.gateway.port, config.gateway.host) == (9002, "0.0.0.0")
    assert config.decode.kv_cache_bytes == 1024 * MIB


def test_an_override_may_hold_an_equals_sign() -> None:
    assert load_config(None, ["model.served_model_name=a=b"]).model.served_model_name == "a=b"


def test_an_override_may_set_null() -> None:
    assert load_config(None, ["model.served_model_name=null"]).model.served_model_name is None


@each(
    ("text", "expected"),
    [
        ("256MiB", 256 * MIB),
        ("1.5G", 1_500_000_000),
        ("64ki", 65536),
        ("10 kb", 10_000),
        ("4096", 4096),
        ("2GIB", 2 << 30),
        ("9007199254740993", 9007199254740993),
    ],
)
def test_sizes(text: str, expected: int) -> None:
    assert parse_size(text) == expected


@each("text", ["", "MiB", "-1MiB", "1 TiB", "1e9", "12 34", "0x10", "9" * 400 + "G"])
def test_what_is_not_a_size(text: str) -> None:
    with pytest.raises(ConfigError, match="not a size"):
        parse_size(text)


NO_NAMES = ("", "/", "/model", "org//model", "org/", "..", "../model", "org/./model", "m" * 201)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("pools: {}", "pools"),
        ("pool: {memory: 3}", "memory"),
        ("pool: 3", "^pool must be a mapping of fields"),
        ("pool:", "^pool is there without a field"),
        ("pool: {memory_bytes: [1]}", r"pool\.memory_bytes"),
        ("pool: {memory_bytes: 1.5}", r"pool\.memory_bytes"),
        ("pool: {memory_bytes: lots}", r"pool\.memory_bytes"),
        ("pool: {memory_bytes: 0MiB}", r"pool\.memory_bytes"),
        (f"decode: {{kv_cache_bytes: {10**30}}}", r"decode\.kv_cache_bytes must be below 2\^63"),
        ("decode: {kv_cache_bytes: 999999999999999G}", r"decode\.kv_cache_bytes must be below 2\^63"),
        (f"router: {{max_retries: {2**63}}}", r"router\.max_retries must be below 2\^63"),
        ("models: [{model: {path: a}}]", "^models: the file lists models, and this command takes one"),
        ("pool: {lease_s: -1}", r"pool\.lease_s"),
        ("pool: {lease_s: .nan}", r"pool\.lease_s"),
        ("topology: sideways", "^topology must be one of"),
        ("model: {path: ''}", r"model\.path"),
        ("model: {dtype: int4}", r"model\.dtype"),
        ("model: {max_context_len: 1}", r"model\.max_context_len"),
        *((f"model: {{served_model_name: {name!r}}}", "served_model_name must be of 1 to 200") for name in NO_NAMES),
        *((f"model: {{aliases: [{name!r}]}}", "aliases must be at most 16 names of 1 to 200") for name in NO_NAMES),
        ("model: {served_model_name: 7}", r"model\.served_model_name"),
        ("gateway: {host: ''}", r"gateway\.host"),
        ("gateway: {port: 0}", r"gateway\.port"),
        ("gateway: {port: 65536}", r"gateway\.port"),
        ("gateway: {port: true}", r"gateway\.port"),
        ("gateway: {count: 0}", r"gateway\.count"),
        ("gateway: {port: 65535, count: 2}", r"gateway\.count"),
        ("gateway: {max_body_bytes: 0}", r"gateway\.max_body_bytes"),
        ("gateway: {requests_per_minute: 0}", r"gateway\.requests_per_minute"),
        ("gateway: {response_lifetime_s: .inf}", r"gateway\.response_lifetime_s .* at most 3162240000"),
        ("batches: {file_lifetime_s: .inf}", r"batches\.file_lifetime_s .* at most 3162240000"),
        ("batches: {assumed_tokens_per_s: .inf}", r"batches\.assumed_tokens_per_s"),
        ("router: {max_queued_requests: 0}", r"router\.max_queued_requests"),
        ("router: {max_learnt_bytes: 1000}", r"router\.max_learnt_bytes"),
        ("router: {max_retries: -1}", r"router\.max_retries"),
        ("router: {max_candidate_requests: 0}", r"router\.max_candidate_requests"),
        ("batching: {min_requests: 0}", r"batching\.min_requests"),
        ("batching: {starvation_s: 0}", r"batching\.starvation_s"),
        ("batching: {max_block_share: 0}", r"batching\.max_block_share"),
        ("batching: {max_block_share: 1.01}", r"batching\.max_block_share"),
        ("batching: {pack_share: 0}", r"batching\.pack_share"),
        ("batching: {max_blocks: 3}", "max_blocks"),
        ("prefill: {candidate_buffer_bytes: -1}", r"prefill\.candidate_buffer_bytes"),
        ("prefill: {count: 0}", r"prefill\.count"),
        ("prefill: {max_num_batched_tokens: 0}", r"prefill\.max_num_batched_tokens"),
        ("decode: {max_running_requests: 0}", r"decode\.max_running_requests"),
        ("engine: {block_size: 17}", r"engine\.block_size"),
        ("engine: {threads_per_worker: 0}", r"engine\.threads_per_worker"),
        ("engine: {device: tpu}", r"engine\.device"),
        ("engine: {attention_backend: avx9000}", r"engine\.attention_backend"),
        ("engine: {kv_transport: pigeon}", r"engine\.kv_transport"),
        ("engine: {kv_transport: cuda_ipc, device: cpu}", r"engine\.kv_transport is cuda_ipc, .* but device is cpu"),
        ("engine: {kv_transport: nccl}", r"engine\.kv_transport must be one of auto, shm, tcp, gloo, cuda_ipc"),
        ("links: {peer_timeout_s: 0.1}", r"links\.peer_timeout_s"),
        ("links: {peer_timeout_s: .inf}", r"links\.peer_timeout_s"),
        ("links: {transport: pigeon}", r"links\.transport"),
    ],
)
def test_every_refusal_names_the_field(tmp_path: Path, text: str, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        load_config(written(tmp_path, text))


@each(
    ("text", "said"),
    [
        ("gateway: {prt: 1}", "gateway: unknown field `prt`; did you mean `port`?"),
        ("gatway: {port: 1}", "unknown field `gatway`; did you mean `gateway`?"),
        ("port: 8001", "unknown field `port`; did you mean `gateway.port`?"),
        (
            "engine: {max_context_len: 9}",
            "engine: unknown field `max_context_len`; did you mean `model.max_context_len`?",
        ),
        ("gateway: {jwt: [{isuer: a}]}", "gateway.jwt[0]: unknown field `isuer`; did you mean `issuer`?"),
        ("gateway: {zzz: 1}", "gateway: unknown field `zzz`; docs/settings.md has all"),
        ("gateway: {jwt: [{issuer: a}]}", "gateway.jwt[0]: the field `audience` is missing"),
        ("gateway: {drain_s: 60s}", "gateway.drain_s must be a number (it is '60s')"),
        ("gateway: {picture_hosts: [a, 1]}", "gateway.picture_hosts[1] must be a text (it is 1)"),
        ("scaling: {max_nodes: x}", "scaling.max_nodes must be a whole number (it is 'x')"),
        ("model: {keep_alive: [1]}", "model.keep_alive must be a number or a text (it is [1])"),
        ("gateway: {cors_origins: " + "a" * 100 + "}", f"gateway.cors_origins must be a list (it is '{'a' * 59}…)"),
        ("gateway:\n  # port: 8001\n", "gateway is there without a field; leave it out as well"),
        ("gateway: 3", "gateway must be a mapping of fields (it is 3)"),
        ("topology: elasic", "topology must be one of elastic, colocated, disaggregated (it is 'elasic')"),
        ("gateway: {port: 0}", "gateway.port must be a TCP port (it is 0)"),
        (
            "gateway: {on: 1}",
            "gateway: a name is not a text; quote words that mean something in YAML, such as on and yes",
        ),
    ],
)
def test_a_refusal_says_what_may_have_been_meant(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load_config(written(tmp_path, text))
    assert str(refused.value) == said


@pytest.mark.parametrize(
    "text",
    [
        "- a\n- b\n",
        "just words",
        "42",
        "a: b: c",
        "{",
        "\t",
        "!!python/object/apply:os.system [true]",
        "model: {served_model_name: 2024-13-45}",
        "[" * 600,
        "[" * 200_000,
        "pool: &pool {again: *pool}",
        "1: 2",
        "? [1, 2]\n: 3",
    ],
)
def test_what_is_not_yaml_or_not_a_mapping(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError):
        load_config(written(tmp_path, text))


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("gateway: {keys_file: keys.yaml}\ngateway:\n  port: 9000\n", "'gateway' is there twice"),
        ("gateway:\n  port: 1\n  host: ::1\n  port: 2\n", "'port' is there twice(.|\n)*line 4"),
        ("models: [{model: {path: a, path: b}}]", "'path' is there twice"),
    ],
)
def test_a_section_or_field_that_is_there_twice_is_refused(tmp_path: Path, text: str, named: str) -> None:
    with pytest.raises(ConfigError, match=named):  # the first would be left out: a gateway would ask for no keys
        load_config(written(tmp_path, text))


def test_the_line_of_a_mistake_is_named(tmp_path: Path) -> None:
    for text, named in (
        ("gateway:\n\tport: 1\n", "line 2 is indented by a tab, and YAML takes spaces alone"),
        ("gateway:\n  port: 1\n host: x\n", "line 3, column 2, while parsing a block mapping that begins in line 1"),
    ):
        with pytest.raises(ConfigError, match=f"cannot be read as YAML: [^\n]*{named}$"):
            load_config(written(tmp_path, text))


def test_an_override_gives_a_section_without_a_field_its_first(tmp_path: Path) -> None:
    assert load_config(written(tmp_path, "gateway:\n# port: 8001\n"), ["gateway.port=9000"]).gateway.port == 9000


def test_a_section_may_take_over_fields_of_another_one(tmp_path: Path) -> None:
    text = "prefill: &both {max_running_requests: 3, count: 2}\ndecode: {<<: *both, count: 4}\n"
    config = load_config(written(tmp_path, text))
    assert (config.decode.max_running_requests, config.decode.count, config.prefill.count) == (3, 4, 2)


def test_a_refused_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cluster\.yaml: the file must be a mapping of sections"):
        load_config(written(tmp_path, "- a\n"))


def test_a_file_that_is_not_text(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_bytes(b"\xff\xfe\x00pool")
    with pytest.raises(ConfigError, match="cannot be read as YAML: it is no text in UTF-8"):
        load_config(path)


def test_a_file_that_is_absent_or_a_folder(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config(tmp_path / "absent.yaml")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config(tmp_path)


def test_a_file_that_is_too_large_is_not_even_parsed(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"cluster\.yaml: larger than {MAX_CONFIG_BYTES} bytes"):
        load_config(written(tmp_path, "#" * (MAX_CONFIG_BYTES + 1)))


@each("override", ["gateway.port", "=3", ".port=3", "gateway.=3", "gateway..port=3", ""])
def test_a_malformed_override_says_how_to_write_it(override: str) -> None:
    with pytest.raises(ConfigError, match=r"write section\.field=value"):
        load_config(None, [override])


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("gateway.port=[", "not valid YAML"),
        ("gateway.port=2024-13-45", "not valid YAML"),
        ("topology.x=1", "topology is not a section"),
        ("gateway.port.x=1", "port is not a section"),
        ("gateway.ports=1", "ports"),
        ("pool.memory_bytes=many", r"pool\.memory_bytes"),
    ],
)
def test_a_wrong_override_is_named(tmp_path: Path, override: str, named: str) -> None:
    path = written(tmp_path, "topology: colocated\ngateway: {port: 9000}\n")
    with pytest.raises(ConfigError, match=named):
        load_config(path, [override])


def test_api_keys_are_split_and_stripped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALIGNEDSERVE_API_KEYS", " one ,,two, ")
    assert api_keys() == ("one", "two")
    for nothing in (",", " ", "\n"):
        monkeypatch.setenv("ALIGNEDSERVE_API_KEYS", nothing)
        with pytest.raises(ConfigError, match="holds no key"):  # and lets nobody in
            api_keys()
    monkeypatch.setenv("ALIGNEDSERVE_API_KEYS", "")  # as compose.yaml says that there are none
    assert api_keys() == ()
    monkeypatch.delenv("ALIGNEDSERVE_API_KEYS")
    assert api_keys() == ()


def test_the_run_folder_may_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALIGNEDSERVE_RUN_DIR", "/run/here")
    assert run_root() == Path("/run/here")
    monkeypatch.delenv("ALIGNEDSERVE_RUN_DIR")
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/7")
    assert run_root() == Path("/run/user/7/alignedserve")


def test_folders_may_be_named_from_where_one_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ALIGNEDSERVE_RUN_DIR", "run")
    monkeypatch.setenv("ALIGNEDSERVE_STATE_DIR", "state")
    assert (run_root(), state_root()) == (tmp_path / "run", tmp_path / "state")


def test_a_user_without_a_home_is_told_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HOME", "XDG_STATE_HOME", "ALIGNEDSERVE_STATE_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", {}.__getitem__)  # the user of a container who is in no list
    with pytest.raises(ConfigError, match="set ALIGNEDSERVE_STATE_DIR, or HOME"):
        state_root()
