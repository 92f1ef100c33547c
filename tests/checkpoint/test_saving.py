"""What `save_checkpoint` leaves on the disk, and what it refuses."""

from __future__ import annotations

import json
import re
import resource
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, load_model
from torch import nn

import parallel_core
from parallel_core import CheckpointError, DistributedConfig
from parallel_core import ranks as collective
from parallel_core.checkpoint import folder
from parallel_core.testing import Ranks
from parallel_core.testing.conformance.runs import KINDS, Run, differences

CONFIGS = {
    "ddp": DistributedConfig(parallel_strategy="ddp"),
    "fsdp": DistributedConfig(parallel_strategy="fsdp", fsdp_mixed_precision="fp32", fsdp_auto_wrap_min_params=50),
    "fsdp2": DistributedConfig(parallel_strategy="fsdp2", fsdp2_mixed_precision="fp32", fsdp2_auto_wrap_min_params=50),
}


def saved_run(place: Path, **options: Any) -> Run:
    """Train a bare model for a step and save it."""
    run = Run("language_model", None)
    run.train(range(1))
    parallel_core.save_checkpoint(place, run.model, run.optimizer, **options)
    return run


def names(place: Path) -> list[str]:
    return sorted(path.name for path in place.iterdir())


def test_full_is_a_file_that_other_tools_read(tmp_path: Path) -> None:
    run = saved_run(tmp_path / "a", state_dict_type="full")
    assert names(tmp_path / "a") == ["manifest.json", "model.safetensors", "optimizer.safetensors"]
    expected = run.full()
    found = load_file(tmp_path / "a" / "model.safetensors")
    # Names that stand for one tensor are saved once, as safetensors has it for models.
    assert set(expected) - set(found) == {"head.weight"}
    assert differences({name: found[name] for name in expected if name in found}, {n: expected[n] for n in found}) == []
    other = Run("language_model", None, seed=1)
    missing, unexpected = load_model(other.model, tmp_path / "a" / "model.safetensors")
    assert not missing
    assert not unexpected
    assert differences(other.full(), expected) == []


def test_full_in_several_files_has_the_usual_index(tmp_path: Path) -> None:
    run = saved_run(tmp_path / "a", state_dict_type="full", max_file_bytes=500)
    index = json.loads((tmp_path / "a" / "model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    assert len(files) > 2
    assert files == [f"model-{number:05}-of-{len(files):05}.safetensors" for number in range(1, len(files) + 1)]
    tensors = {name: tensor for file in files for name, tensor in load_file(tmp_path / "a" / file).items()}
    assert {name: index["weight_map"][name] for name in tensors} == index["weight_map"]
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors.values())
    other = Run("language_model", None, seed=1)
    parallel_core.load_checkpoint(tmp_path / "a", other.model, other.optimizer)
    assert differences(other.full(), run.full()) == []


@pytest.mark.parametrize("kind", KINDS)
def test_weights_are_exported_in_another_dtype(tmp_path: Path, kind: str) -> None:
    """The floating-point weights alone; the optimizer's state stays as it is."""
    run = saved_run(tmp_path / "a", state_dict_type=kind, dtype=(dtype := torch.bfloat16))
    other = Run("language_model", None, seed=1)
    with pytest.raises(CheckpointError, match=r"wrong dtype: the model has float32.*bfloat16.*cast=True converts"):
        parallel_core.load_checkpoint(tmp_path / "a", other.model)
    parallel_core.load_checkpoint(tmp_path / "a", other.model, other.optimizer, cast=True)
    rounded = {name: value.to(dtype).to(value.dtype) for name, value in run.full().items()}
    assert differences(other.full(), rounded) == []
    assert run.optimizer is not None
    assert other.optimizer is not None
    assert (
        differences(
            parallel_core.optimizer_state_dict(other.model, other.optimizer),
            parallel_core.optimizer_state_dict(run.model, run.optimizer),
        )
        == []
    )


@pytest.mark.parametrize("kind", KINDS)
def test_a_weight_that_is_too_large_for_the_dtype_is_refused_by_name(tmp_path: Path, kind: str) -> None:
    model = nn.Linear(2, 2)
    nn.init.constant_(model.bias, 1e6)
    message = r"'bias' has 1e\+06, and float16 goes from -65504 to 65504; choose another dtype"
    with pytest.raises(CheckpointError, match=message):
        parallel_core.save_checkpoint(tmp_path / "a", model, state_dict_type=kind, dtype=torch.float16)
    assert names(tmp_path) == []


FLOAT8 = ("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu")


@pytest.mark.parametrize("name", FLOAT8)
def test_weights_are_exported_in_float8_unless_they_are_out_of_its_range(tmp_path: Path, name: str) -> None:
    dtype = getattr(torch, name)
    model, finite = nn.Linear(2, 3), torch.tensor([1.0, 240.0, 0.5])

    def saved(*bias: float, kind: str = "full") -> torch.Tensor:
        model.bias.data[:] = torch.tensor(bias)
        model.weight.data.fill_(1)
        parallel_core.save_checkpoint(tmp_path / "a", model, state_dict_type=kind, dtype=dtype)
        parallel_core.load_checkpoint(tmp_path / "a", model, cast=True)
        return model.bias.data

    for kind in KINDS:
        assert torch.equal(saved(*finite.tolist(), kind=kind), finite.to(dtype).to(torch.float32))
    assert saved(float("nan"), 1.0, 1.0).isnan().tolist() == [True, False, False]
    limits = torch.finfo(dtype)
    for wrong in (-1.0 if limits.min > 0 else -limits.max * 1.5, limits.max * 1.5):
        with pytest.raises(CheckpointError, match=rf"'bias' has {re.escape(f'{wrong:g}')}, and {name} goes from"):
            saved(1.0, wrong, 1.0)
    if name == "float8_e5m2":  # alone has infinity
        assert saved(float("inf"), 1.0, float("-inf")).tolist() == [float("inf"), 1.0, float("-inf")]
    else:
        with pytest.raises(CheckpointError, match=f"'bias' has inf, and {name} goes from"):
            saved(1.0, 1.0, float("inf"))


@pytest.mark.parametrize("strategy", CONFIGS)
def test_loaded_trained_and_saved_to_the_same_name_again(ranks: Ranks, tmp_path: Path, strategy: str) -> None:
    """No tensor lives on in a file: the new one is whole, and what is trained on is not the file's."""

    def work(kind: str) -> list[str]:
        place = tmp_path / kind
        run = Run("language_model", CONFIGS[strategy])
        for step in range(3):
            run.step(step)
            parallel_core.save_checkpoint(place, run.model, run.optimizer, state_dict_type=kind)
            expected = run.full()
            run = Run("language_model", CONFIGS[strategy], seed=9)
            parallel_core.load_checkpoint(place, run.model, run.optimizer)
            if lines := differences(run.full(), expected):
                return [f"after step {step}: {lines}"]
        return sorted(path.name for path in tmp_path.iterdir() if kind in path.name)

    for kind in KINDS:
        assert ranks(work, kind) == [[kind], [kind]]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("failing", [0, 1])
def test_a_rank_whose_disk_is_full_is_told_of_on_every_rank(
    ranks: Ranks, tmp_path: Path, kind: str, failing: int
) -> None:
    """The same error on all ranks; the checkpoint before is as it was, and nothing is left of the new one."""

    def work() -> tuple[str, list[str], list[str]]:
        place = tmp_path / "step-1"
        run = Run("blocks", CONFIGS["fsdp2"])
        run.step(0)
        parallel_core.save_checkpoint(place, run.model, run.optimizer, state_dict_type=kind)
        expected = run.full()
        run.step(1)
        _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
        if collective.rank() == failing:
            resource.setrlimit(resource.RLIMIT_FSIZE, (2000, most))  # what a quota does
        try:
            parallel_core.save_checkpoint(place, run.model, run.optimizer, state_dict_type=kind)
        except CheckpointError as error:
            message = str(error)
        else:
            message, expected = "saved", run.full()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
        parallel_core.load_checkpoint(place, run.model, run.optimizer)
        return message, differences(run.full(), expected), names(tmp_path)

    (first, lines, left), (second, *_) = ranks(work)
    if kind == "full" and failing == 1:
        assert first == second == "saved"  # by rank 0 alone
    else:
        assert first == second
        assert first.startswith(f"rank {failing} of 2: ")
        assert first.endswith("safetensors can't be written: File too large")
    assert (lines, left) == ([], ["step-1"])


def test_ranks_that_ask_for_different_things_are_told(ranks: Ranks, tmp_path: Path) -> None:
    def work() -> list[str]:
        run = Run("blocks", CONFIGS["ddp"])
        mine: list[dict[str, Any]] = [
            {"path": tmp_path / f"rank-{collective.rank()}"},
            {"state_dict_type": KINDS[collective.rank()]},
            {"optimizer": [run.optimizer, None][collective.rank()]},
            {"extra": {"loss": collective.rank()}},
            {"objects": {"a": run.optimizer} if collective.rank() else {}},
        ]
        found = []
        for options in mine:
            with pytest.raises(CheckpointError) as caught:
                parallel_core.save_checkpoint(**{"path": tmp_path / "a", "model": run.model, **options})
            found.append(str(caught.value))
        parallel_core.save_checkpoint(tmp_path / "b", run.model, extra=None if collective.rank() else {"loss": 1})
        return found

    first, second = ranks(work)
    assert first == second
    *alike, extra, objects = first
    assert alike == [
        f"every rank must save in the same way: {difference}"
        for difference in (
            f"path is {str(tmp_path / 'rank-0')!r} on rank 0 and {str(tmp_path / 'rank-1')!r} on rank 1",
            "state_dict_type is 'full' on rank 0 and 'sharded' on rank 1",
            "optimizer is 'AdamW' on rank 0 and 'NoneType' on rank 1",
        )
    ]
    assert extra.startswith("extra is not the same on rank 1 as on rank 0")
    assert objects.startswith("objects is not the same on rank 1 as on rank 0")
    assert names(tmp_path) == ["b"]


def test_what_fails_on_one_rank_is_raised_on_all(ranks: Ranks, tmp_path: Path) -> None:
    """Whatever is looked at first: no rank goes ahead, to wait for one that has stopped."""

    class Keys(torch.optim.SGD):
        keys: tuple[Any, ...] = ("a",)

        def step(self, closure: Any = None) -> None:  # type: ignore[override]  # takes no closure
            for parameter in self.param_groups[0]["params"]:
                self.state[parameter] = dict.fromkeys(self.keys, torch.ones(2))

    def work() -> list[str]:
        bare = nn.Linear(2, 2)
        model = parallel_core.wrap_model_for_training(bare, CONFIGS["ddp"])
        assert model is not None
        optimizer = Keys(model.parameters(), lr=0.1)
        other = collective.rank() == 1
        if other:
            optimizer.keys = ("a", (1, 2))
        optimizer.step()
        mine: list[dict[str, Any]] = [
            {"model": bare if other else model},
            {"model": None if other else model},
            {"model": bare.state_dict() if other else model},
            {"model": nn.LazyLinear(2) if other else model},
            {"model": nn.Linear(2, 2, device="meta") if other else model},
            {"optimizer": 3 if other else None},
            {"optimizer": optimizer},
            {"objects": [optimizer] if other else {}},
            {"random_state": True},
            {"dtype": torch.float4_e2m1fn_x2 if other else None, "state_dict_type": "full"},
        ]
        found = []
        before = np.random.get_state()
        if other:
            np.random.set_bit_generator(np.random.PCG64(0))  # type: ignore[attr-defined]  # not in its __all__
        for options in mine:
            with pytest.raises(CheckpointError) as caught:
                parallel_core.save_checkpoint(**{"path": tmp_path / "a", "model": model, **options})
            found.append(str(caught.value))
        if other:
            np.random.set_bit_generator(np.random.MT19937())  # type: ignore[attr-defined]  # as above
        np.random.set_state(before)
        return found

    first, second = ranks(work)
    assert first == second
    expected = [
        "this Linear is the module inside a wrapped model, whose parameters may be this rank's shards alone; pass what",
        "model: expected a torch.nn.Module, found NoneType",
        "model: expected a torch.nn.Module, found OrderedDict",
        "RuntimeError: Can't access the shape of an uninitialized parameter",
        "on the meta device, without values to read: 'weight', 'bias'; give the model values first: load a state dict",
        "optimizer: expected a torch.optim.Optimizer or None, found int",
        "the optimizer's state for 'weight' has the key (1, 2); expected plain strings",
        "objects: expected a dict of objects by name, found list",
        "random_state: numpy.random has been given a PCG64, and only NumPy's own choice, MT19937, can be saved; use a",
        "dtype: expected a torch.dtype of float64, float32, float16, bfloat16, float8_e4m3fn, float8_e4m3fnuz, ",
    ]
    for message, beginning in zip(first, expected, strict=True):
        assert message.startswith(f"rank 1 of 2: {beginning}"), message
    assert names(tmp_path) == []


class Partial(nn.Sequential):
    """Leaves its first layer out of its state dict, as one does with a backbone that stays as it was downloaded."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(2, 2), nn.Linear(2, 1))

        def drop(_module: nn.Module, state: dict[str, Any], prefix: str, _metadata: Any) -> None:
            for name in ("0.weight", "0.bias"):
                del state[f"{prefix}{name}"]

        self.register_state_dict_post_hook(drop)  # type: ignore[no-untyped-call]  # torch's own is not annotated


def test_what_a_state_dict_leaves_out_is_not_saved_and_must_not_train(tmp_path: Path) -> None:
    model = Partial()
    optimizer = torch.optim.AdamW(model[1].parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    parallel_core.save_checkpoint(tmp_path / "a", model, optimizer)
    other = Partial()
    before = other.get_parameter("0.weight").clone()
    parallel_core.load_checkpoint(tmp_path / "a", other, torch.optim.AdamW(other[1].parameters()))
    assert torch.equal(other.get_parameter("1.weight"), model.get_parameter("1.weight"))
    assert torch.equal(other.get_parameter("0.weight"), before)

    trained = torch.optim.AdamW(model.parameters())
    trained.step()
    with pytest.raises(CheckpointError) as caught:
        parallel_core.save_checkpoint(tmp_path / "b", model, trained)
    assert str(caught.value) == (
        "the optimizer has state of parameters that the state dict of the model leaves out: '0.weight', '0.bias'; let "
        "the hook, or the override of state_dict, leave them there"
    )
    parallel_core.save_checkpoint(tmp_path / "whole", nn.Sequential(*model), trained)
    with pytest.raises(CheckpointError, match="state of parameters that the state dict of the model leaves out"):
        parallel_core.load_checkpoint(tmp_path / "whole", other, torch.optim.AdamW(other.parameters()), strict=False)
    state = parallel_core.optimizer_state_dict(model, trained)  # has its own names, and needs no state of the model
    parallel_core.load_optimizer_state_dict(model, torch.optim.AdamW(model.parameters()), state)


def test_older_siblings_are_pruned_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "log.txt").write_text("mine")
    for step in (3, 1, 2):  # by age, not by name
        saved_run(tmp_path / f"step-{step}", keep_last=2)
    assert names(tmp_path) == ["log.txt", "notes", "step-1", "step-2"]
    assert parallel_core.latest_checkpoint(tmp_path) == tmp_path / "step-2"
    assert parallel_core.latest_checkpoint(tmp_path / "notes") is None
    assert parallel_core.latest_checkpoint(tmp_path / "nowhere") is None
    saved_run(tmp_path / "step-1")
    assert parallel_core.latest_checkpoint(tmp_path) == tmp_path / "step-1"


@pytest.mark.parametrize("can_exchange", [True, False])
def test_leftovers_are_cleaned_by_the_next_save_and_never_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, can_exchange: bool
) -> None:
    if not can_exchange:
        monkeypatch.setattr(folder, "exchange", lambda one, other: False)
    first = saved_run(tmp_path / "step-1")
    # What a process leaves that is killed while it builds one, and between the two renames of a replacement.
    (tmp_path / ".step-2.saving-0123abcd").mkdir()
    (tmp_path / ".step-2.saving-0123abcd" / "model.safetensors").write_bytes(b"half")
    (tmp_path / "step-1").rename(tmp_path / ".step-1.replaced-4567abcd")
    assert parallel_core.latest_checkpoint(tmp_path) == tmp_path / "step-1"
    other = Run("language_model", None, seed=1)
    parallel_core.load_checkpoint(tmp_path / "step-1", other.model, other.optimizer)
    assert differences(other.full(), first.full()) == []
    with pytest.raises(CheckpointError, match="step-2 is no complete checkpoint: there is no such folder"):
        parallel_core.load_checkpoint(tmp_path / "step-2", other.model)
    saved_run(tmp_path / "step-3")
    assert names(tmp_path) == ["step-1", "step-3"]
    saved_run(tmp_path / "step-1")
    assert names(tmp_path) == ["step-1", "step-3"]


def test_a_save_that_goes_on_is_not_cleaned_away(tmp_path: Path) -> None:
    with folder.folder_to_build(tmp_path / "step-1") as building:
        saved_run(tmp_path / "step-2")
        assert building.is_dir()
    assert names(tmp_path) == ["step-2"]


WITHOUT_PICKLE = (
    "which can't be saved without pickle; possible are dicts, lists, tuples, numbers, strings, bytes and None"
)
A_DTYPE = (
    "dtype: expected a torch.dtype of float64, float32, float16, bfloat16, float8_e4m3fn, float8_e4m3fnuz, "
    "float8_e5m2, float8_e5m2fnuz, float8_e8m0fnu, found"
)
REFUSED: dict[str, dict[str, Any]] = {
    "state_dict_type: expected 'full' or 'sharded', found 'fulll'; did you mean 'full'?": {"state_dict_type": "fulll"},
    "keep_last: expected a whole number from 1 on or None, found 0": {"keep_last": 0},
    "keep_last: expected a whole number from 1 on or None, found True": {"keep_last": True},
    "max_file_bytes is for state_dict_type='full'; under 'sharded' each rank has one file": {"max_file_bytes": 10},
    f"{A_DTYPE} 'bf16'": {"dtype": "bf16"},
    f"{A_DTYPE} torch.int8": {"dtype": torch.int8},
    f"extra['at'][0]: found pathlib.PosixPath, {WITHOUT_PICKLE}": {"extra": {"at": [Path("x")]}},
    f"extra: found torch.Tensor, {WITHOUT_PICKLE}; call .tolist() or .item()": {"extra": torch.ones(1)},
    "extra['at']: '\\udc80' is no text that JSON can hold: surrogates not allowed": {"extra": {"at": "\udc80"}},
    "extra: the key '\\udc80': '\\udc80' is no text that JSON can hold: surrogates not allowed": {
        "extra": {"\udc80": 1}
    },
    "objects['loader'] has no state_dict(): found object": {"objects": {"loader": object()}},
    "objects: expected names that are plain strings, found 1": {"objects": {"a": nn.Linear(2, 2), 1: nn.Linear(2, 2)}},
    "objects: expected a dict of objects by name, found list": {"objects": []},
    f"{A_DTYPE} torch.float4_e2m1fn_x2": {"dtype": torch.float4_e2m1fn_x2},
    "the name of an object: '\\udc80' is no text that JSON can hold: surrogates not allowed": {
        "objects": {"\udc80": nn.Linear(2, 2)}
    },
    "model: expected a torch.nn.Module, found OrderedDict": {"model": nn.Linear(2, 2).state_dict()},
    "optimizer: expected a torch.optim.Optimizer or None, found int": {"optimizer": 3},
    "path: '.hidden' can't be a checkpoint's folder; choose a name without a leading dot": {"path": ".hidden"},
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_can_t_be_saved_is_told(tmp_path: Path, message: str) -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(CheckpointError) as caught:
        parallel_core.save_checkpoint(**{"path": tmp_path / "a", "model": model, **REFUSED[message]})
    assert str(caught.value) == message
    assert names(tmp_path) == []


def test_a_place_where_something_else_stands_is_refused(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    (tmp_path / "file").touch()
    (tmp_path / "half").mkdir()
    (tmp_path / "half" / "__0_0.distcp").write_bytes(b"half")
    (tmp_path / "empty").mkdir()
    with pytest.raises(
        CheckpointError, match=f"^{tmp_path}/file/below/it: {tmp_path}/file is no folder; choose another"
    ):
        parallel_core.save_checkpoint(tmp_path / "file" / "below" / "it", model)
    for name, message in {
        "file": "is there and is no folder; choose another name",
        "half": "is there and is no checkpoint: it lacks manifest.json; move it away, or choose another name",
    }.items():
        with pytest.raises(CheckpointError) as caught:
            parallel_core.save_checkpoint(tmp_path / name, model)
        assert str(caught.value) == f"{tmp_path / name} {message}"
    parallel_core.save_checkpoint(tmp_path / "empty", model)
    assert names(tmp_path / "empty") == ["manifest.json", "model-rank-00000-of-00001.safetensors"]


def test_a_tensor_that_no_file_can_hold_is_named(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    model.register_buffer("sparse", torch.eye(2).to_sparse())
    with pytest.raises(CheckpointError, match=r"'sparse': a tensor of torch\.sparse_coo float32 can't be saved"):
        parallel_core.save_checkpoint(tmp_path / "a", model)


def test_sparse_momentum_is_saved_dense(tmp_path: Path) -> None:
    model = nn.Embedding(4, 2, sparse=True)
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.5)
    model(torch.tensor([1, 1])).sum().backward()
    optimizer.step()
    parallel_core.save_checkpoint(tmp_path / "a", model, optimizer)
    assert optimizer.state[model.weight]["momentum_buffer"].is_sparse
    again = torch.optim.SGD(model.parameters(), momentum=0.5)
    parallel_core.load_checkpoint(tmp_path / "a", model, again)
    expected = torch.tensor([[0.0, 0.0], [2.0, 2.0], [0.0, 0.0], [0.0, 0.0]])
    assert torch.equal(again.state[model.weight]["momentum_buffer"], expected)


def test_state_of_an_optimizer_that_would_be_lost_is_refused(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters())
    optimizer.state["shared"] = {"t": 2}  # type: ignore[index]  # as some optimizers have it
    with pytest.raises(CheckpointError, match="SGD keeps state under 'shared', which is no parameter"):
        parallel_core.save_checkpoint(tmp_path / "a", model, optimizer)
    assert not (tmp_path / "a").exists()


def test_a_model_that_was_changed_after_the_wrap_is_not_saved_without_the_change(ranks: Ranks, tmp_path: Path) -> None:
    def work() -> str:
        net = nn.Linear(2, 2)
        net.register_buffer("mean", None)
        model = parallel_core.wrap_model_for_training(net, CONFIGS["ddp"])
        assert model is not None
        net.mean = torch.zeros(2)
        with pytest.raises(CheckpointError) as caught:
            parallel_core.save_checkpoint(tmp_path / "a", model)
        return str(caught.value).partition(";")[0]

    assert ranks(work) == ["the model has changed since it was wrapped: the buffer 'mean' was added"] * 2
    assert list(tmp_path.iterdir()) == []


class Torn(nn.Module):
    """Gives its extra state once: for the names in its state dict."""

    asked = False

    def get_extra_state(self) -> Any:
        if self.asked:
            raise RuntimeError("no state")
        self.asked = True


class Thing:
    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> Any:
        if isinstance(self.state, Exception):
            raise self.state
        return self.state

    def load_state_dict(self, state: Any) -> None: ...


def test_what_fails_or_has_no_values_is_named_by_its_place(tmp_path: Path) -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters())
    optimizer.state[model.weight] = {"\ud800": 1}

    def message(**options: Any) -> str:
        with pytest.raises(CheckpointError) as caught:
            parallel_core.save_checkpoint(**{"path": tmp_path / "a", "model": model, **options})
        return str(caught.value)

    assert message(model=nn.Sequential(Torn())) == (
        "'0._extra_state': get_extra_state() of Torn failed: RuntimeError: no state"
    )
    assert message(objects={"a": Thing(RuntimeError("bad"))}) == ("objects['a'].state_dict() failed: RuntimeError: bad")
    assert message(objects={"a": Thing({"b": torch.ones(1, device="meta")})}) == (
        "objects['a'].state_dict()['b']: found a tensor on the meta device, which has no values to save"
    )
    assert message(extra={"n": 10**5000}) == ("extra['n']: found an integer of 16610 bits, expected at most 8192")
    assert message(optimizer=optimizer).startswith("a key of the optimizer's state for 'weight': '\\ud800' is no text")
    for flag in ("background", "checksum", "random_state"):
        assert message(**{flag: "no"}) == f"{flag}: expected True or False, found str"
    assert names(tmp_path) == []
    parallel_core.save_checkpoint(tmp_path / "a", model, extra={"n": 10**2000})
    assert parallel_core.load_checkpoint(tmp_path / "a", model).extra == {"n": 10**2000}
    for flag in ("strict", "cast", "random_state", "verify"):
        with pytest.raises(CheckpointError, match=f"{flag}: expected True or False, found str"):
            parallel_core.load_checkpoint(tmp_path / "a", model, **{flag: "no"})  # type: ignore[arg-type]  # on purpose
    with pytest.raises(CheckpointError, match="objects: expected a dict of objects by name, found list"):
        parallel_core.load_checkpoint(tmp_path / "a", model, objects=["a"])  # type: ignore[arg-type]  # on purpose
