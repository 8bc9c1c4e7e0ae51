"""How one rank ends: its trainer leaves or dies, and its keeper stays until the hub releases it."""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING

from holdfast import _errors
from holdfast._environment.processes.identity import host_name
from holdfast._keeper import protocol
from holdfast._keeper.postmortem import PostMortem
from holdfast._keeper.ranks.ending import looks_like_a_lost_peer
from holdfast._keeper.ranks.state import EndCause
from holdfast._store.folder.attempts import read_json
from holdfast._store.memory import control

if TYPE_CHECKING:
    from holdfast._keeper.keeper import Keeper
    from holdfast._keeper.ranks.member import Member

_LINGER_SECONDS = 60.0
_LAST_MESSAGES_SECONDS = 10.0
_ASK_AGAIN_SECONDS = 0.05


class Departure:
    """The end of one rank's trainer, and then of its keeper."""

    def __init__(self, keeper: Keeper, config: protocol.RankConfig, member: Member) -> None:
        self._keeper = keeper
        self._config = config
        self._member = member
        self.is_trainer_gone = False
        self.farewell: protocol.RankFarewell | None = None  # with which the trainer left
        self.is_released = False
        self._gone_at = 0.0
        self._has_died = False
        self._death: PostMortem | None = None
        self._linger_until: float | None = None

    # -- the trainer's end ------------------------------------------------------

    def take_farewell(self, said: protocol.TrainerFarewell) -> None:
        self.farewell = protocol.RankFarewell(
            clean=said.clean,
            reason=said.reason,
            status=said.status,
            victim=looks_like_a_lost_peer(said.error or ""),
            host=host_name(),
            agreed=said.agreed,
        )
        self._member.link.to_hub(self.farewell)

    def leave_cleanly(self) -> None:
        """The trainer leaves; the slots stay until the hub needs them no more."""
        if self.farewell is None:
            self.take_farewell(protocol.TrainerFarewell(clean=True, reason="closed", status=0))

    def on_goodbye(self) -> None:
        self.is_trainer_gone, self._gone_at = True, time.monotonic()
        self._keeper.stop_watching_memory()
        self._keeper.end_series()
        self.leave_cleanly()

    def on_death(self) -> None:
        keeper = self._keeper
        # Also after a goodbye: a pidfd stays readable, and the loop would spin.
        if keeper.ends.pidfd is not None:
            with contextlib.suppress(KeyError, ValueError):
                keeper.selector.unregister(keeper.ends.pidfd)
        if self.is_trainer_gone:
            return
        self.is_trainer_gone, self._gone_at = True, time.monotonic()
        keeper.timers.cancel("kill")
        keeper.stop_watching_memory()
        keeper.receive_rest()  # also of one that was told to leave: it may have made an arena
        keeper.end_series()
        was_expected = self.is_released or keeper.trainer.leave_status is not None
        if was_expected or self.farewell is not None:
            if self.farewell is None:
                keeper.examine_death()
            self.leave_cleanly()
            return
        self._death = keeper.examine_death()
        self._report_death(self._death)

    def _report_death(self, death: PostMortem) -> None:
        if not death.ask():  # its parent has not collected the status yet
            self._keeper.timers.after(_ASK_AGAIN_SECONDS, lambda: self._report_death(death))
            return
        self._has_died = True
        self._member.agent.report()
        how, step = death.how or "died", self._keeper.trainer.step
        self._member.link.to_hub(protocol.RankDied(how=how, host=host_name(), step=step))
        death.write(durable=False)

    def leave_without_hub(self) -> None:
        """There is nothing left to agree with: the trainer must not go on."""
        trainer, policy = self._keeper.trainer, self._keeper.policy
        is_leaving = self.farewell is not None or trainer.leave_status is not None
        if self.is_trainer_gone or is_leaving:
            return
        record = read_json(policy.layout.rank(policy.attempt, 0))
        host = record.get("keeper", {}).get("host", "")
        cause = EndCause(0, "cannot be reached any more", kind="died", host=host)
        speaks = policy.rank == 1  # one rank prints it, not all
        if speaks:
            self._keeper.journal("rank-died", rank=0, how=cause.how, host=host)
        step = self._keeper.storage.durable_step
        trainer.order_to_leave(cause.sentence(), _errors.REQUEUE, step, asked=False, speaks=speaks)

    # -- the keeper's end -------------------------------------------------------

    def release(self) -> None:
        """The hub needs this keeper no more."""
        self.is_released = True

    def stop_lingering(self) -> None:
        """Nothing will start the ranks again."""
        if self._linger_until is not None:
            self._linger_until = 0.0

    def leave_if_free(self, now: float) -> None:
        """The trainer is gone: end the keeper when nothing needs it any more."""
        keeper, link, hub = self._keeper, self._member.link, self._member.hub
        if not self.is_released and not link.is_hub_gone(now):
            return
        if hub is not None:
            if not hub.is_over:
                return
            # Before anything that takes time: the next attempt waits for it.
            keeper.record_death(None if self._death is None else self._death.how)
            waiting = [r for r in link.post.unacknowledged() if not hub.is_out_of_reach(r)]
            if waiting and now - self._gone_at <= _LAST_MESSAGES_SECONDS:
                return
        if self._linger_until is None:
            self._linger_until = self._begin_to_linger(now)
        if now < self._linger_until and not self._is_followed():
            return
        keeper.storage.writer.wait_idle()  # an old checkpoint may be half removed
        keeper.storage.release(is_needed=not self.is_released or self._is_memory_needed())
        link.close()
        keeper.finish()

    def _begin_to_linger(self, now: float) -> float:
        """Keep the slots for ranks that are started again; returns until when."""
        keeper = self._keeper
        if self._death is not None:
            self._death.write(durable_step=keeper.storage.durable_step)
        comes_back = keeper.trainer.leave_status in (_errors.REQUEUE, _errors.HUNG)
        if not self._config.restarts or not (self._has_died or comes_back):
            return 0.0
        keeper.storage.holdings.hash_newest()
        return now + _LINGER_SECONDS

    def _is_followed(self) -> bool:
        """True if a newer attempt has begun: it opens what we hold before it does."""
        with contextlib.suppress(OSError):
            policy = self._keeper.policy
            return policy.layout.attempt_numbers()[-1] > policy.attempt
        return False

    def _is_memory_needed(self) -> bool:
        """Only a state that all ranks hold is of use to the next start."""
        storage = self._keeper.storage
        if not storage.has_failed() or storage.holdings.salvages:
            return storage.has_failed()
        common = int(self._keeper.trainer.words[control.COMMON]) - 1
        durable = -1 if storage.durable_step is None else storage.durable_step
        return durable < common // 2 < storage.invalid_from
