"""Before a wrap everything that could go wrong is found and agreed on by the ranks, with nothing touched."""

from __future__ import annotations

import importlib
import importlib.metadata
import logging
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

import parallel_core
from parallel_core import WrapError, wrap_model_for_training, wrap_optimizer
from parallel_core import ranks as core
from parallel_core.distributed import Group
from parallel_core.errors import ParallelCoreError
from parallel_core.record import find_record, inner_module
from parallel_core.registry import registrations
from parallel_core.strategy import bound_strategy
from parallel_core.testing import Ranks

Install = Callable[..., str]
OnRanks = Callable[..., list[Any]]

RING = """
from parallel_core import StrategyConfig, WrapError, hookimpl, ranks

class RingConfig(StrategyConfig):
    check: str = ""
    wrap: str = ""
    on: tuple[int, ...] = ()
    in_place: bool = False

@hookimpl
def strategy_config():
    return RingConfig

@hookimpl
def applies(world_size, device):
    return device.type == "cpu"

def fail(how):
    if how == "refuse":
        raise WrapError("needs a ring")
    if how == "crash":
        raise KeyError("ring")

@hookimpl
def check_model(config):
    if ranks.rank() not in config.on:
        return []
    fail(config.check)
    return ["the ring is open", "it has no stone"] if config.check == "list" else []

@hookimpl
def wrap_model(model, config):
    from torch import nn

    if ranks.rank() in config.on:
        fail(config.wrap)
        if config.wrap == "nothing":
            return None
    return model if config.in_place else nn.Sequential(model)

@hookimpl
def wrap_optimizer(optimizer, config):
    optimizer.seen = config
    return optimizer
"""


def forget() -> None:
    registrations.cache_clear()
    bound_strategy.cache_clear()
    importlib.invalidate_caches()
    for module in [name for name in sys.modules if name.startswith("fake_")]:
        del sys.modules[module]


@pytest.fixture
def on_ranks(ranks: Ranks, install_strategy: Install) -> OnRanks:
    """Run a function on ranks that have the fake strategies `ring` and `shy` installed, and forget them again."""
    install_strategy("ring", RING, distribution="pc-ring")
    install_strategy("shy", settings="depth: int = 0", distribution="pc-shy")

    def run(function: Callable[..., Any], *args: Any, world_size: int = 2) -> list[Any]:
        def with_fakes() -> Any:
            forget()  # a worker serves many tests
            try:
                return function(*args)
            finally:
                forget()

        return ranks(with_fakes, world_size=world_size)

    return run


def config_of(strategy: str = "ring", **settings: Any) -> parallel_core.DistributedConfig:
    named = {f"{strategy}_{name}": value for name, value in settings.items()}
    return parallel_core.DistributedConfig(parallel_strategy=strategy, backend="gloo", **named)


def model_of() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))


Outcome = tuple[str, str]


def outcome(call: Callable[[], Any]) -> Outcome:
    """Return the class and the text of what a call raises."""
    try:
        call()
    except ParallelCoreError as error:
        return type(error).__name__, str(error)
    return "", ""


def refused(on_ranks: OnRanks, work: Callable[[], Any], world_size: int = 2) -> Outcome:
    """Return what every rank raises, after making sure that it is the same and came at once."""

    def timed() -> tuple[Outcome, float]:
        start = time.monotonic()
        return outcome(work), time.monotonic() - start

    results = on_ranks(timed, world_size=world_size)
    assert max(seconds for _, seconds in results) < 10
    first: Outcome
    first, *others = [found for found, _ in results]
    assert others == [first] * (world_size - 1)
    return first


def refused_models(on_ranks: OnRanks, make: Callable[[], nn.Module], world_size: int = 2) -> str:
    """Return why a model is refused, after making sure that it is as it was."""

    def work() -> None:
        model = make()
        modules = [(name, type(module)) for name, module in model.named_modules()]
        tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        attributes = sorted(vars(model))
        try:
            wrap_model_for_training(model, config_of())
        finally:
            assert modules == [(name, type(module)) for name, module in model.named_modules()]
            now = {**dict(model.named_parameters()), **dict(model.named_buffers())}
            assert tensors.keys() == now.keys()
            assert all(tensors[name] is now[name] for name in tensors)
            assert attributes == sorted(vars(model))

    kind, text = refused(on_ranks, work, world_size)
    assert kind == "WrapError"
    return text


def test_with_two_ranks_the_model_is_wrapped_and_has_its_record(on_ranks: OnRanks) -> None:
    def work() -> tuple[str, str, list[str], bool]:
        model = model_of()
        wrapped = wrap_model_for_training(model, config_of())
        assert wrapped is not None
        record = find_record(wrapped)
        assert record is not None
        return (
            record.strategy.name,
            str(record.config.options),
            list(record.layout.entries),
            inner_module(wrapped) is model,
        )

    expected = ("ring", "RingConfig(check='', wrap='', on=(), in_place=False)", list(model_of().state_dict()), True)
    assert on_ranks(work) == [expected] * 2


def test_in_a_world_of_one_a_strategy_may_apply_as_well(
    install_strategy: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_strategy("ring", RING)
    model = model_of()
    assert wrap_model_for_training(model, config_of(in_place=True), device="cpu") is model
    assert find_record(model) is not None


def test_a_rank_that_has_joined_no_process_group_is_refused(ranks: Ranks) -> None:
    def work() -> str:
        with pytest.raises(WrapError) as caught:
            wrap_model_for_training(model_of(), parallel_core.DistributedConfig())
        return str(caught.value)

    text = "2 ranks were started (WORLD_SIZE), and this one has joined no process group"
    assert all(found.startswith(text) for found in ranks(work, process_group=False))


def test_where_the_strategy_declines_on_every_rank_the_answer_is_none(on_ranks: OnRanks) -> None:
    assert on_ranks(lambda: wrap_model_for_training(model_of(), config_of(), device="meta")) == [None, None]


@pytest.mark.parametrize(
    ("check", "on", "text"),
    [
        ("list", (0, 1, 2), "strategy 'ring' can't wrap this model: the ring is open; it has no stone"),
        ("list", (1,), "rank 1 of 3: strategy 'ring' can't wrap this model: the ring is open; it has no stone"),
        ("refuse", (0, 2), "ranks 0, 2 of 3: needs a ring"),
        (
            "crash",
            (2,),
            "rank 2 of 3: strategy 'ring' (pc-ring 1.0) failed to check the model: KeyError: 'ring'",
        ),
    ],
)
def test_what_a_check_finds_on_any_rank_is_one_wrap_error_on_every_rank(
    on_ranks: OnRanks, check: str, on: tuple[int, ...], text: str
) -> None:
    def work() -> None:
        wrap_model_for_training(model_of(), config_of(check=check, on=on))

    assert refused(on_ranks, work, world_size=3) == ("WrapError", text)


@pytest.mark.parametrize(
    ("wrap", "on", "kind", "text"),
    [
        ("refuse", (0, 1), "WrapError", "needs a ring"),
        ("refuse", (1,), "WrapError", "rank 1 of 2: needs a ring"),
        (
            "crash",
            (0,),
            "WrapError",
            "rank 0 of 2: strategy 'ring' (pc-ring 1.0) failed to wrap the model: KeyError: 'ring'",
        ),
        (
            "nothing",
            (1,),
            "StrategyError",
            (
                "rank 1 of 2: strategy 'ring' (pc-ring 1.0): hook wrap_model returned NoneType, expected Module; this "
                "is a bug in pc-ring"
            ),
        ),
    ],
)
def test_a_wrap_that_fails_on_any_rank_is_one_error_on_every_rank_and_leaves_no_record(
    on_ranks: OnRanks, wrap: str, on: tuple[int, ...], kind: str, text: str
) -> None:
    def work() -> None:
        model = model_of()
        try:
            wrap_model_for_training(model, config_of(wrap=wrap, on=on))
        finally:
            assert find_record(model) is None

    assert refused(on_ranks, work) == (kind, text)


def on_rank_1(change: Callable[[nn.Sequential], Any]) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        model = model_of()
        found = change(model) if core.rank() == 1 else None
        return found if isinstance(found, nn.Module) else model

    return make


class Swapped(nn.Module):
    def __init__(self, order: int) -> None:
        super().__init__()
        for name in ("a", "b") if order == 0 else ("b", "a"):
            setattr(self, name, nn.Linear(2, 2))


def buffer(model: nn.Sequential, size: int) -> None:
    model.register_buffer("cache", torch.zeros(size), persistent=False)


DIFFERENCES: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "shape": (
        on_rank_1(lambda model: nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(3))),
        (
            "'0.weight' is float32[3, 2] on rank 0, float32[4, 2] on rank 1; '0.bias' is float32[3] on rank 0, "
            "float32[4] on rank 1"
        ),
    ),
    "dtype": (
        on_rank_1(lambda model: nn.Sequential(model[0].double(), model[1])),
        (
            "'0.weight' is float32[3, 2] on rank 0, float64[3, 2] on rank 1; '0.bias' is float32[3] on rank 0, "
            "float64[3] on rank 1"
        ),
    ),
    "frozen": (
        on_rank_1(lambda model: model.requires_grad_(False) and None),
        "the frozen parameters are [] on rank 0, ['0.weight', '0.bias', '1.weight', '1.bias'] on rank 1",
    ),
    "names": (
        on_rank_1(lambda model: nn.Sequential(model[0])),
        (
            "'1.weight' is float32[3] on rank 0, absent on rank 1; '1.bias' is float32[3] on rank 0, absent on rank 1; "
            "'1.running_mean' is float32[3] on rank 0, absent on rank 1; '1.running_var' is float32[3] on rank 0, "
            "absent on rank 1; '1.num_batches_tracked' is int64[] on rank 0, absent on rank 1"
        ),
    ),
    "order": (lambda: Swapped(core.rank()), "the order of the names on rank 1 is not that on rank 0"),
    "a buffer that is not saved": (
        on_rank_1(lambda model: buffer(model, 3)),
        "'cache' is absent on rank 0, float32[3] on rank 1",
    ),
}


@pytest.mark.parametrize("difference", DIFFERENCES)
def test_models_that_differ_between_ranks_are_refused(on_ranks: OnRanks, difference: str) -> None:
    make, text = DIFFERENCES[difference]
    assert refused_models(on_ranks, make) == f"the ranks do not agree: {text}; build the same model everywhere"


def test_parameters_that_are_tied_on_one_rank_only_are_refused(on_ranks: OnRanks) -> None:
    def make() -> nn.Module:
        first, second = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
        if core.rank() == 1:
            second.weight = first.weight
        return nn.Sequential(first, second)

    assert refused_models(on_ranks, make) == (
        "the ranks do not agree: the tied parameters are [] on rank 0, [('0.weight', '1.weight')] on rank 1; build the "
        "same model everywhere"
    )


def test_no_more_than_five_differences_are_told(on_ranks: OnRanks) -> None:
    def make() -> nn.Module:
        return nn.Sequential(*(nn.Linear(2 + core.rank(), 2, bias=False) for _ in range(8)))

    text = refused_models(on_ranks, make)
    assert text.count(" on rank 1") == 5
    assert text.endswith("; and 3 more; build the same model everywhere")


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"ring_in_place": True}, "ring_in_place is False on rank 0, True on rank 1"),
        ({"timeout_seconds": 5.0}, "timeout_seconds is 600.0 on rank 0, 5.0 on rank 1"),
        ({"parallel_strategy": "shy"}, "parallel_strategy is 'ring' on rank 0, 'shy' on rank 1"),
    ],
)
def test_configs_that_differ_between_ranks_are_refused(on_ranks: OnRanks, settings: dict[str, Any], text: str) -> None:
    def work() -> None:
        given = {"parallel_strategy": "ring", "backend": "gloo", **(settings if core.rank() == 1 else {})}
        wrap_model_for_training(model_of(), parallel_core.DistributedConfig(**given))

    told = f"the ranks do not agree: {text}; give every rank the same config"
    assert refused(on_ranks, work) == ("WrapError", told)


def test_where_config_and_model_differ_the_advice_is_about_the_config(on_ranks: OnRanks) -> None:
    def work() -> None:
        wrap_model_for_training(nn.Linear(2, 2 + core.rank()), config_of(in_place=core.rank() == 1))

    told = "the ranks do not agree: ring_in_place is False on rank 0, True on rank 1; give every rank the same config"
    assert refused(on_ranks, work) == ("WrapError", told)


def test_settings_of_a_strategy_that_is_not_used_may_differ(on_ranks: OnRanks) -> None:
    def work() -> bool:
        config = parallel_core.DistributedConfig(parallel_strategy="ring", shy_depth=core.rank())
        return wrap_model_for_training(model_of(), config) is not None

    assert on_ranks(work) == [True, True]


def test_a_strategy_that_declines_on_one_rank_only_is_refused(on_ranks: OnRanks) -> None:
    def work() -> None:
        wrap_model_for_training(model_of(), config_of(), device="cpu" if core.rank() == 0 else "meta")

    assert refused(on_ranks, work) == (
        "WrapError",
        (
            "the ranks do not agree: the answer of hook applies is True for cpu on rank 0, False for meta on rank 1; "
            "train on the same kind of device on every rank"
        ),
    )


def test_a_strategy_that_is_missing_on_one_rank_is_one_error_on_every_rank(on_ranks: OnRanks) -> None:
    def work() -> None:
        config = config_of()
        if core.rank() == 1:
            sys.path[:] = [path for path in sys.path if "site-packages" in path or "/lib/python" in path]
            forget()
        wrap_model_for_training(model_of(), config)

    kind, text = refused(on_ranks, work)
    assert kind == "StrategyError"
    assert text.startswith("rank 1 of 2: unknown strategy 'ring': ")


def test_a_model_that_is_on_the_meta_device_on_one_rank_only_is_refused(on_ranks: OnRanks) -> None:
    def make() -> nn.Module:
        return nn.Linear(2, 3, bias=False, device="meta" if core.rank() == 1 else "cpu")

    assert refused_models(on_ranks, make) == (
        "the ranks do not agree: 'weight' has values on rank 0, is on the meta device on rank 1; build the same model "
        "everywhere"
    )


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature:UserWarning")  # torch says so of every lazy module
def test_parameters_and_buffers_that_have_no_shape_yet_are_refused(on_ranks: OnRanks) -> None:
    assert refused_models(on_ranks, lambda: nn.Sequential(nn.LazyLinear(3), nn.LazyBatchNorm1d())) == (
        "not initialized yet: '0.weight', '0.bias', '1.weight', '1.bias', '1.running_mean', '1.running_var'; run the "
        "bare model once, so that they get their shapes"
    )


@pytest.mark.parametrize("in_place", [False, True])
def test_a_model_that_is_wrapped_already_is_refused(on_ranks: OnRanks, *, in_place: bool) -> None:
    def work() -> None:
        wrapped = wrap_model_for_training(model_of(), config_of(in_place=in_place))
        assert wrapped is not None
        wrap_model_for_training(wrapped, config_of())

    assert refused(on_ranks, work) == (
        "WrapError",
        "this model is wrapped already, by strategy 'ring' (pc-ring 1.0); wrap the bare model, once",
    )


def test_the_module_inside_a_wrapped_one_is_refused(on_ranks: OnRanks) -> None:
    def work() -> None:
        model = model_of()
        wrap_model_for_training(model, config_of())
        wrap_model_for_training(model, config_of())

    kind, text = refused(on_ranks, work)
    assert (kind, text.partition(",")[0]) == ("WrapError", "this Sequential is the module inside a wrapped model")


@pytest.mark.parametrize("in_place", [False, True])
def test_a_model_with_a_wrapped_part_is_refused(on_ranks: OnRanks, *, in_place: bool) -> None:
    def work() -> None:
        part = wrap_model_for_training(model_of(), config_of(in_place=in_place))
        assert part is not None
        wrap_model_for_training(nn.Sequential(part, nn.Linear(3, 3)), config_of())

    assert refused(on_ranks, work) == (
        "WrapError",
        (
            "part '0' of this Sequential is wrapped already, and the whole is not; wrap the whole bare model, once, or "
            "pass each wrapped part alone"
        ),
    )


@pytest.mark.parametrize(
    ("wrap", "kind"),
    [
        (nn.parallel.DistributedDataParallel, "DistributedDataParallel"),
        (nn.DataParallel, "DataParallel"),
        (lambda model: FullyShardedDataParallel(model, device_id=torch.device("cpu")), "FullyShardedDataParallel"),
        (fully_shard, "FSDPLinear"),
    ],
)
def test_what_torch_runs_in_parallel_already_is_refused(on_ranks: OnRanks, wrap: Any, kind: str) -> None:
    text = f"is a {kind} already; pass the bare model"
    assert refused_models(on_ranks, lambda: wrap(nn.Linear(2, 2))) == f"the model {text}"
    assert refused_models(on_ranks, lambda: nn.Sequential(wrap(nn.Linear(2, 2)), nn.ReLU())) == f"'0' {text}"


def test_what_is_no_module_is_refused(on_ranks: OnRanks) -> None:
    assert refused(on_ranks, lambda: wrap_model_for_training({}, config_of())) == (  # type: ignore[arg-type]  # the wrong type is the point
        "WrapError",
        "expected a torch.nn.Module to wrap, found dict",
    )


class Hiding(nn.Sequential):
    """Shows the bias alone to who asks for its parameters."""

    def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
        return ((name, each) for name, each in super().named_parameters(*args, **kwargs) if each.dim() == 1)


class Odd(nn.Sequential):
    """Has ways through it that torch could not go."""

    def named_parameters(self) -> Any:  # type: ignore[override]  # takes nothing
        return super().named_parameters()

    def parameters(self, recurse: bool = True) -> Any:
        return list(super().parameters(recurse))


def test_a_model_that_answers_in_another_way_is_refused(ddp_and_fsdp: None) -> None:
    from parallel_core.starting import checked_layout

    with pytest.raises(
        WrapError, match=r"Odd overrides named_parameters\(\), which answers otherwise than torch's own"
    ):
        checked_layout(Odd(nn.Linear(2, 2)))
    del Odd.named_parameters
    with pytest.raises(WrapError, match=r"Odd overrides parameters\(\), which answers otherwise than torch's own"):
        checked_layout(Odd(nn.Linear(2, 2)))


def test_a_model_that_hides_its_parameters_is_refused(on_ranks: OnRanks) -> None:
    assert refused_models(on_ranks, lambda: Hiding(nn.Linear(2, 2))) == (
        "Hiding overrides named_parameters(), which answers otherwise than torch's own, by which the parts of a model "
        "are found; give the override another name"
    )


def test_a_device_is_one_whatever_its_form_and_what_is_none_is_told(
    monkeypatch: pytest.MonkeyPatch, ddp_and_fsdp: None
) -> None:
    from parallel_core.wrapping import chosen_device

    config = parallel_core.DistributedConfig(backend="gloo")
    for asked in (None, "cpu", "cpu:0", torch.device("cpu", 0)):
        assert str(chosen_device(asked, config)) == "cpu"
    group: Any = Group(rank=0, local_rank=0, world_size=1, device=torch.device("cpu"))
    wrongs: dict[Any, str] = {
        "cuda:x": "'cuda:x' (Invalid device string: 'cuda:x')",
        1.5: "1.5",
        group: f"{group}; pass its .device",
    }
    for wrong, found in wrongs.items():
        with pytest.raises(WrapError) as caught:
            chosen_device(wrong, config)
        assert str(caught.value) == f"device: expected a torch.device or its name, found {found}"
    with pytest.raises(WrapError, match=r"its name, found 'gpu' \(Expected one of cpu, cuda, .*: gpu\)$"):
        chosen_device("gpu", config)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 3)
    assert chosen_device("cuda", config) == torch.device("cuda", 3)
    assert chosen_device("cuda:1", config) == torch.device("cuda", 1)
    assert chosen_device("meta", config) == torch.device("meta")


def test_a_refused_model_can_be_wrapped_afterwards(on_ranks: OnRanks) -> None:
    def work() -> bool:
        model = model_of()
        assert outcome(lambda: wrap_model_for_training(model, config_of(check="refuse", on=(1,))))[0] == "WrapError"
        return wrap_model_for_training(model, config_of()) is not None

    assert on_ranks(work) == [True, True]


def test_an_optimizer_that_was_made_before_the_wrap_is_refused(on_ranks: OnRanks) -> None:
    def work() -> Outcome:
        model = model_of()
        optimizer = torch.optim.SGD(model.parameters())
        wrapped = wrap_model_for_training(model, config_of())
        assert wrapped is not None
        return outcome(lambda: wrap_optimizer(wrapped, optimizer))

    told = (
        "the optimizer was made before the model was wrapped and may train nothing; make it from the parameters of "
        "the wrapped model, after wrap_model_for_training"
    )
    assert on_ranks(work) == [("WrapError", told)] * 2


def test_an_optimizer_that_was_made_after_the_wrap_is_handed_to_the_strategy(on_ranks: OnRanks) -> None:
    def work() -> tuple[bool, Any, bool]:
        model = model_of()
        other = torch.optim.SGD(nn.Linear(2, 2).parameters())
        wrapped = wrap_model_for_training(model, config_of(in_place=True))
        assert wrapped is not None
        optimizer: Any = torch.optim.SGD(wrapped.parameters())
        compiled: Any = torch.compile(wrapped, backend="aot_eager")
        same = wrap_optimizer(wrapped, optimizer) is optimizer
        return same and wrap_optimizer(compiled, optimizer) is optimizer, optimizer.seen.in_place, other is not None

    assert on_ranks(work) == [(True, True, True)] * 2


@pytest.mark.parametrize(
    ("make", "found"),
    [
        (lambda found, rank: torch.optim.SGD(found[rank:]), "the place of '0.weight' in the optimizer is 0 of group 0"),
        (lambda found, rank: torch.optim.SGD(found[rank : rank + 1]), "the place of '0.weight' in the optimizer is 0"),
        (lambda found, rank: torch.optim.SGD(found[:: 1 - 2 * rank]), "the place of '0.weight' in the optimizer is 0"),
        (lambda found, rank: [torch.optim.SGD, torch.optim.Adam][rank](found), "the optimizer is SGD on rank 0, Adam"),
        (
            lambda found, rank: torch.optim.SGD([{"params": found, "lr": 0.5 + rank}]),
            "'lr' of the optimizer's group 0 is 0.5 on rank 0, 1.5 on rank 1; make the same optimizer on every rank",
        ),
        (
            lambda found, rank: torch.optim.SGD(found, lr=torch.tensor(0.5 + rank)),
            "'lr' of the optimizer's group 0 is 0.5 on rank 0, 1.5 on rank 1; make the same optimizer on every rank",
        ),
        (
            lambda found, rank: torch.optim.Adam(found, betas=(0.5, 0.5 + rank / 4)),
            "'betas' of the optimizer's group 0 is 0.5, 0.5 on rank 0, 0.5, 0.75 on rank 1; make the same optimizer",
        ),
    ],
)
def test_optimizers_that_differ_between_ranks_are_refused(on_ranks: OnRanks, make: Any, found: str) -> None:
    def work() -> None:
        model = wrap_model_for_training(model_of(), config_of())
        assert model is not None
        wrap_optimizer(model, make(list(model.parameters()), core.rank()))

    kind, text = refused(on_ranks, work)
    assert kind == "WrapError"
    assert text.startswith(f"the ranks do not agree: {found}")


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        (lambda wrapped: next(wrapped.children()), "rank 1 of 2: this Sequential is the module inside a wrapped model"),
        (lambda wrapped: None, "rank 1 of 2: expected a model, a torch.nn.Module, found NoneType"),
    ],
)
def test_what_is_no_wrapped_model_on_one_rank_is_refused_on_every_rank(
    on_ranks: OnRanks, wrong: Any, told: str
) -> None:
    def work() -> Outcome:
        model: Any = wrap_model_for_training(model_of(), config_of())
        optimizer = torch.optim.SGD(model.parameters())
        return outcome(lambda: wrap_optimizer(wrong(model) if core.rank() else model, optimizer))

    (kind, text), other = on_ranks(work)
    assert other == (kind, text)
    assert kind == "WrapError"
    assert text.startswith(told)


def test_a_bare_model_on_several_ranks_is_warned_of(on_ranks: OnRanks) -> None:
    def work() -> list[str]:
        model = model_of()
        records: list[logging.LogRecord] = []
        handler = logging.Handler()
        handler.emit = records.append  # type: ignore[assignment, method-assign]
        logging.getLogger("parallel_core.training").addHandler(handler)
        wrap_optimizer(model, torch.optim.SGD(model.parameters()))
        logging.getLogger("parallel_core.training").removeHandler(handler)
        return [record.getMessage() for record in records]

    told = (
        "wrap_optimizer: this Sequential is not wrapped, and nothing averages its gradients over the 2 ranks; pass "
        "what wrap_model_for_training returned"
    )
    assert on_ranks(work) == [[told], [told]]


def test_an_optimizer_of_other_parameters_is_refused() -> None:
    model = model_of()
    optimizer = torch.optim.SGD([*model.parameters(), *nn.Linear(2, 2).parameters()])
    with pytest.raises(WrapError) as caught:
        wrap_optimizer(model, optimizer)
    assert str(caught.value) == (
        "2 of the 6 parameters of the optimizer are not the model's; make it from the parameters of the wrapped model, "
        "after wrap_model_for_training; to train two models with it, wrap one module that has both"
    )


def test_an_optimizer_of_a_bare_model_or_of_a_part_of_it_is_returned_as_it_is() -> None:
    model = model_of()
    for parameters in (model.parameters(), model[0].parameters()):
        optimizer = torch.optim.SGD(parameters)
        assert wrap_optimizer(model, optimizer) is optimizer


def test_the_record_does_not_keep_earlier_optimizers_alive(install_strategy: Install) -> None:
    import gc
    import weakref

    install_strategy("ring", RING)
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters())
    wrap_model_for_training(model, config_of(in_place=True), device="cpu")
    gone = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert gone() is None


def test_the_device_is_the_cpu_where_the_backend_is_gloo(monkeypatch: pytest.MonkeyPatch, ddp_and_fsdp: None) -> None:
    from parallel_core.wrapping import local_device

    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    assert local_device(parallel_core.DistributedConfig(backend="gloo")) == torch.device("cpu")


def test_the_device_is_the_local_ranks_accelerator(monkeypatch: pytest.MonkeyPatch, ddp_and_fsdp: None) -> None:
    from parallel_core.wrapping import local_device

    config = parallel_core.DistributedConfig()
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    assert local_device(config) == torch.device("cpu")
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    assert local_device(config) == torch.device("cuda", 0)
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert local_device(config) == torch.device("cuda", 3)
