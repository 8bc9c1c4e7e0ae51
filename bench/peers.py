"""Other libraries, each in the settings that suit it best here.

Where one does not fsync, all that it wrote is fsynced after it, and that counts as its own.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from pathlib import Path
from typing import Any

import torch

from bench.machine import cores
from bench.states import State
from bench.ways import Pending, Way, seconds_of, sync_all


class TorchSave(Way):
    name = "torch.save, fsync"

    def begin(self, number: int) -> Pending:
        place = self.kept(number)
        torch.save(self.state.state_dict(), place)
        return Pending(lambda: sync_all(place))

    def load(self, state: State, folder: Path) -> float:
        # Mapped and assigned is quicker to return, but leaves the reading to the first step.
        place = last(folder)
        return seconds_of(lambda: state.load(torch.load(place, weights_only=True)))


class Safetensors(Way):
    name = "safetensors save_file, fsync"
    package = "safetensors"

    def begin(self, number: int) -> Pending:
        from safetensors.torch import save_file

        place = self.kept(number)
        save_file(flat(self.state), place)
        return Pending(lambda: sync_all(place))

    def load(self, state: State, folder: Path) -> float:
        from safetensors.torch import load_file

        def load() -> None:
            stored = load_file(last(folder))
            state.load(unflat(state, stored))

        return seconds_of(load)


def flat(state: State) -> dict[str, torch.Tensor]:
    """Tensors by one name each; what else an optimizer has is a few numbers in its groups."""
    found = {f"model.{name}": tensor for name, tensor in state.model.state_dict().items()}
    if state.optimizer is not None:
        for number, kept in state.optimizer.state_dict()["state"].items():
            found |= {f"optimizer.{number}.{name}": tensor for name, tensor in kept.items()}
    return found


def unflat(state: State, stored: dict[str, torch.Tensor]) -> dict[str, Any]:
    found: dict[str, Any] = {"model": {}}
    moments: dict[int, dict[str, torch.Tensor]] = {}
    for name, tensor in stored.items():
        where, _, rest = name.partition(".")
        if where == "model":
            found["model"][rest] = tensor
        else:
            number, _, key = rest.partition(".")
            moments.setdefault(int(number), {})[key] = tensor
    if state.optimizer is not None:
        found["optimizer"] = {**state.optimizer.state_dict(), "state": moments}
    return found


class Dcp(Way):
    """torch.distributed.checkpoint, which fsyncs by itself."""

    name = "DCP save"
    grouped = False

    def open(self, state: State, folder: Path) -> None:
        super().open(state, folder)
        if self.grouped:
            import torch.distributed as dist

            os.environ["GLOO_SOCKET_IFNAME"] = "lo"
            store = f"file://{folder}/store"
            dist.init_process_group("gloo", init_method=store, rank=0, world_size=1)

    def writer(self, number: int) -> Any:
        from torch.distributed.checkpoint import FileSystemWriter

        return FileSystemWriter(self.kept(number), thread_count=cores())

    def begin(self, number: int) -> Pending:
        from torch.distributed.checkpoint import save

        save(self.state.state_dict(), storage_writer=self.writer(number), no_dist=True)
        return Pending(lambda: sync_all(self.kept(number)))

    def load(self, state: State, folder: Path) -> float:
        from torch.distributed.checkpoint import FileSystemReader, load

        def read() -> None:
            _make_moments(state)
            stored = state.state_dict()
            load(stored, storage_reader=FileSystemReader(last(folder)), no_dist=True)
            state.load(stored)

        return seconds_of(read)


def _make_moments(state: State) -> None:
    """DCP reads into what is there, so an optimizer needs its moments first."""
    if state.optimizer is not None:
        for parameter in state.model.parameters():
            state.optimizer.state[parameter] = {
                "step": torch.tensor(0.0),
                "exp_avg": torch.empty_like(parameter).detach(),
                "exp_avg_sq": torch.empty_like(parameter).detach(),
            }


class DcpAsync(Dcp):
    """With a stager that stays, so that its memory is used again."""

    name = "DCP async_save, thread, stager kept"
    is_slow = True
    kind_of_saver = "THREAD"
    shared = False
    staged_beside = False

    def open(self, state: State, folder: Path) -> None:
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

        super().open(state, folder)
        self.stager = DefaultStager(StagingOptions(False, self.shared, self.staged_beside, False))

    def begin(self, number: int) -> Pending:
        from torch.distributed.checkpoint import async_save
        from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

        saving = async_save(
            self.state.state_dict(),
            storage_writer=self.writer(number),
            async_stager=self.stager,
            async_checkpointer_type=AsyncCheckpointerType[self.kind_of_saver],
            no_dist=not self.grouped,
        )
        if self.staged_beside:
            # Until then a step may not change the tensors.
            saving.staging_completion.result()
            saving = saving.upload_completion
        return _future(saving, self.kept(number))


def _future(future: Any, place: Path) -> Pending:
    def wait() -> None:
        future.result()
        sync_all(place)

    return Pending(wait, future.done)


class DcpProcess(DcpAsync):
    name = "DCP async_save, process, stager kept"
    is_slow = True
    kind_of_saver = "PROCESS"
    shared = True
    grouped = True


class DcpZeroOverhead(DcpProcess):
    name = "DCP async_save, process, staged in a thread"
    is_slow = False
    staged_beside = True


class DcpAsCalled(Dcp):
    """Without a thought for settings."""

    name = "DCP async_save, as people call it"
    is_slow = True

    def begin(self, number: int) -> Pending:
        from torch.distributed.checkpoint import async_save

        place = self.kept(number)
        return _future(
            async_save(self.state.state_dict(), checkpoint_id=place, no_dist=True), place
        )


class TorchSnapshot(Way):
    name = "torchsnapshot async_take, fsync"
    is_slow = True
    package = "torchsnapshot"

    def begin(self, number: int) -> Pending:
        from torchsnapshot import Snapshot

        place = self.kept(number)
        taking = Snapshot.async_take(str(place), self.state.objects())

        def wait() -> None:
            taking.wait()
            sync_all(place)

        return Pending(wait, taking.done)

    def load(self, state: State, folder: Path) -> float:
        from torchsnapshot import Snapshot

        return seconds_of(lambda: Snapshot(str(last(folder))).restore(state.objects()))


class Lightning(Way):
    name = "Lightning AsyncCheckpointIO, fsync"
    is_slow = True
    package = "lightning"

    def open(self, state: State, folder: Path) -> None:
        from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO

        super().open(state, folder)
        self.io = AsyncCheckpointIO(TorchCheckpointIO())
        with contextlib.suppress(AttributeError):  # made by the first save in older versions
            self.io._ensure_setup()

    def begin(self, number: int) -> Pending:
        place = self.kept(number)
        self.io.save_checkpoint(self.state.state_dict(), place)
        # It has one thread, so what is asked for now runs when the write is over.
        over = self.io._executor.submit(int)

        def wait() -> None:
            over.result()
            if self.io._error is not None:
                raise self.io._error
            sync_all(place)

        return Pending(wait, over.done)

    def close(self) -> None:
        self.io.teardown()

    def load(self, state: State, folder: Path) -> float:
        from lightning.pytorch.plugins.io import TorchCheckpointIO

        place = last(folder)
        reader = TorchCheckpointIO()
        return seconds_of(lambda: state.load(reader.load_checkpoint(place)))


class Orbax(Way):
    """Over the same memory, as NumPy arrays."""

    name = "Orbax AsyncCheckpointer, fsync"
    is_slow = True
    package = "orbax.checkpoint"

    def open(self, state: State, folder: Path) -> None:
        import orbax.checkpoint as ocp

        super().open(state, folder)
        self.saver = ocp.AsyncCheckpointer(ocp.StandardCheckpointHandler())
        self.arguments = ocp.args.StandardSave

    def begin(self, number: int) -> Pending:
        place = self.kept(number)
        tree = {name: tensor.detach().numpy() for name, tensor in flat(self.state).items()}
        self.saver.save(place, args=self.arguments(tree))

        def wait() -> None:
            self.saver.wait_until_finished()
            sync_all(place)

        return Pending(wait)

    def close(self) -> None:
        self.saver.close()

    def load(self, state: State, folder: Path) -> float:
        import orbax.checkpoint as ocp

        place = last(folder)

        def read() -> None:
            with ocp.Checkpointer(ocp.StandardCheckpointHandler()) as reader:
                tree = reader.restore(place)
            stored = {name: torch.from_numpy(array) for name, array in _as_numpy(tree)}
            state.load(unflat(state, stored))

        return seconds_of(read)


def _as_numpy(tree: dict[str, Any]) -> list[tuple[str, Any]]:
    import numpy

    return [(name, numpy.asarray(array).copy()) for name, array in tree.items()]


class DLRover(Way):
    """Flash checkpoint, with the saving process that it starts where no agent of its own runs."""

    name = "DLRover flash checkpoint, fsync"
    package = "dlrover"

    def open(self, state: State, folder: Path) -> None:
        from dlrover.trainer.torch.flash_checkpoint import engine
        from dlrover.trainer.torch.flash_checkpoint.checkpointer import StorageType
        from dlrover.trainer.torch.flash_checkpoint.ddp import DdpCheckpointer

        super().open(state, folder)
        (folder / "flash").mkdir()
        self.disk = StorageType.DISK
        # The process that it forks sometimes does not answer; it is given another chance then.
        engine.wait_socket_server.__defaults__ = (10,)
        for chance in (3, 2, 1):
            os.environ["TORCHELASTIC_RUN_ID"] = f"bench-{os.getpid()}-{chance}"
            try:
                self.checkpointer = DdpCheckpointer(str(folder / "flash"))
                return
            except TimeoutError:
                if chance == 1:
                    raise

    def begin(self, number: int) -> Pending:
        place, step = self.kept(number), number + 1
        self.checkpointer.save_checkpoint(step, self.state.state_dict(), str(place), self.disk)
        tracker = self.folder / "flash" / "dlrover_latest.txt"

        def is_over() -> bool:
            return tracker.exists() and tracker.read_text().strip() == str(step)

        def wait() -> None:
            while not is_over():
                time.sleep(0.002)  # its own wait looks every three seconds
            sync_all(place)

        return Pending(wait, is_over)

    def close(self) -> None:
        self.checkpointer._engine._shm_handler.unlink()
        self.checkpointer._engine.close()
        process = self.checkpointer._engine.saver_proc
        if process is not None:
            process.kill()
        shutil.rmtree(self.folder / "flash", ignore_errors=True)
        for sockets in Path("/tmp/ckpt_sock").glob(f"bench-{os.getpid()}-*"):
            shutil.rmtree(sockets, ignore_errors=True)

    def load(self, state: State, folder: Path) -> float:
        place = last(folder)
        return seconds_of(lambda: state.load(torch.load(place, weights_only=False)))


def last(folder: Path) -> Path:
    """The newest save of a way."""
    return max(folder.glob("save-*"), key=lambda path: int(path.name.split("-")[1]))


PEERS: tuple[type[Way], ...] = (
    DcpZeroOverhead,
    DcpProcess,
    DcpAsync,
    DcpAsCalled,
    Dcp,
    DLRover,
    Lightning,
    Orbax,
    TorchSnapshot,
    Safetensors,
    TorchSave,
)
