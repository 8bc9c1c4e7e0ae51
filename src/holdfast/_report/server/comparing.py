"""The runs that a page shows side by side, read when they have changed.

A model of a run takes megabytes. It is kept only while the run lives; of a run that has ended its
facts are kept, which are small.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from holdfast._errors import HoldfastError
from holdfast._report import html as report_page
from holdfast._report.compare import Comparison, RunFacts, assemble_comparison, gather_facts
from holdfast._report.model import RunModel
from holdfast._report.server.find import Odd
from holdfast._report.server.index import Watched

_MOST_FACTS = 300
_MOST_MODELS = 24


@dataclass(frozen=True)
class SentComparison:
    tag: str
    found: Comparison
    body: bytes
    packed: bytes


@dataclass
class _KeptFacts:
    watched: Watched
    lock: threading.Lock = field(default_factory=threading.Lock)
    stamp: object = None
    facts: RunFacts | None = None
    model: RunModel | None = None


class Comparisons:
    """Facts of the runs compared last. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: OrderedDict[str, _KeptFacts] = OrderedDict()

    def newest(self, runs: Sequence[Watched], metric: str | None) -> SentComparison:
        """Those of the runs that can be read, as they are now."""
        facts = []
        for watched in runs:
            with contextlib.suppress(Odd, HoldfastError, OSError):
                facts.append(self._facts(watched))
        found = assemble_comparison(facts, metric, has_all_curves=False)
        body = report_page.to_json(found).encode()
        # The time at which it was made is no news.
        same = report_page.to_json({**found, "made_at": 0}).encode()
        tag = f'"{hashlib.blake2b(same, digest_size=12).hexdigest()}"'
        return SentComparison(tag, found, body, gzip.compress(body, 1))

    def _facts(self, watched: Watched) -> RunFacts:
        watched.follower.check()
        kept = self._get(watched)
        with kept.lock:
            stamp = watched.follower.signature()
            if kept.facts is None or kept.stamp != stamp or kept.facts.run["is_live"]:
                if kept.model is None:
                    kept.model = RunModel(watched.follower.folder, look=watched.follower.is_live)
                kept.model.update()
                kept.facts = gather_facts(kept.model, watched.key, watched.name)
                kept.stamp = stamp
                if not kept.facts.run["is_live"]:
                    kept.model = None
            return kept.facts

    def _get(self, watched: Watched) -> _KeptFacts:
        with self._lock:
            kept = self._kept.get(watched.key)
            # A run that was removed and made again has the same key.
            if kept is None or kept.watched is not watched:
                kept = self._kept[watched.key] = _KeptFacts(watched)
            self._kept.move_to_end(watched.key)
            while len(self._kept) > _MOST_FACTS:
                self._kept.popitem(last=False)
            models = [each for each in self._kept.values() if each.model is not None]
            for each in models[:-_MOST_MODELS]:
                each.model = None
            return kept
