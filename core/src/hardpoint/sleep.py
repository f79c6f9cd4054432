"""What sleeps: one state per tag, kept by the driver for the group."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import Enum

from hardpoint.errors import LifecycleError

TAGS = ("weights", "kv_cache")
LEVELS = (1, 2)


class Residency(Enum):
    """The state of one tag."""

    AWAKE = "awake"
    ASLEEP = "asleep"
    WEIGHTS_UNDEFINED = (
        "weights undefined"  # memory is back, contents are not: reload before executing
    )
    PARTIAL = "partial"  # ranks differ after a failed call: wake again


_ALL_AWAKE = [Residency.AWAKE] * len(TAGS)


class SleepStateError(LifecycleError):
    """Something needs state that is asleep, undefined or partial.

    What to do: wake what the message names, and reload weights that were dropped; then call again.
    """


def check_tags(tags: Iterable[str] | None) -> tuple[str, ...]:
    """Return the tags meant (None: all), each once; raise ValueError for unknown ones or for none
    at all.
    """
    if tags is None:
        return TAGS
    if isinstance(tags, str):
        tags = (tags,)
    chosen = tuple(dict.fromkeys(tags))
    unknown = [tag for tag in chosen if tag not in TAGS]
    if unknown or not chosen:
        raise ValueError(f"tags must be some of {', '.join(TAGS)}, not {unknown or list(chosen)}")
    return chosen


class SleepState:
    """The sleep state machine; transitions only, no I/O."""

    def __init__(self) -> None:
        self._state = dict.fromkeys(TAGS, Residency.AWAKE)
        self._dropped_weights = False
        self._versions = dict.fromkeys(TAGS, 0)

    @property
    def versions(self) -> Mapping[str, int]:
        """Tag -> a number that rises whenever its contents may have been lost or replaced, so that
        a driver knows what it has cached of them is worthless.
        """
        return self._versions

    @property
    def state(self) -> Mapping[str, Residency]:
        """Tag -> state."""
        return dict(self._state)

    @property
    def sleeping_tags(self) -> frozenset[str]:
        """Tags whose memory is not there."""
        return frozenset(
            tag
            for tag, state in self._state.items()
            if state in (Residency.ASLEEP, Residency.PARTIAL)
        )

    @property
    def is_awake(self) -> bool:
        """Whether everything is in memory and defined: a step can run."""
        return list(self._state.values()) == _ALL_AWAKE

    @property
    def is_sleeping(self) -> bool:
        """Whether any tag sleeps."""
        return bool(self.sleeping_tags)

    def require_awake(self, action: str) -> None:
        """Raise SleepStateError unless every tag is awake."""
        if list(self._state.values()) == _ALL_AWAKE:  # before every step, so no more is looked at
            return
        for tag, state in self._state.items():
            if state is not Residency.AWAKE:
                way_out = {
                    Residency.ASLEEP: f"wake_up(tags=[{tag!r}]) first",
                    Residency.PARTIAL: f"ranks differ; wake_up(tags=[{tag!r}]) again",
                    Residency.WEIGHTS_UNDEFINED: "reload_weights() first",
                }[state]
                raise SleepStateError(f"{action} needs {tag} awake, it is {state.value}: {way_out}")

    def require_weights(self, action: str) -> None:
        """Raise SleepStateError unless the weights are in memory, and what they should be."""
        state = self._state["weights"]
        if state is not Residency.AWAKE:
            raise SleepStateError(f"{action} needs weights awake, they are {state.value}")

    def has_slept(self, level: int) -> bool:
        """Whether all sleeps already, as deeply as ``level``.

        Raises ValueError unless ``level`` is one of LEVELS, and SleepStateError if only a part
        sleeps, or less deeply: what is to become of the rest is not for a guess.
        """
        if level not in LEVELS:
            raise ValueError(f"sleep level must be one of {LEVELS}, not {level!r}")
        if not self.is_sleeping:
            return False
        deep = level == 1 or self._dropped_weights
        if deep and all(state is Residency.ASLEEP for state in self._state.values()):
            return True
        now = ", ".join(f"{tag} {state.value}" for tag, state in self._state.items())
        kept = "" if self._dropped_weights else ", with the weights kept"
        awake = level == 2 and self._state["weights"] is Residency.AWAKE
        other = ", or discard(tags=['weights'])" if awake else ""
        raise SleepStateError(f"sleep({level}) finds {now}{kept}: wake_up() first{other}")

    def slept(self, level: int) -> None:
        """Everything sleeps now; level 2 has dropped the weights (dropped ones stay so)."""
        self._dropped_weights |= level == 2
        self._state = dict.fromkeys(TAGS, Residency.ASLEEP)
        self._versions["kv_cache"] += 1

    def discarded(self, tags: Iterable[str]) -> None:
        """These tags sleep now, without a backup."""
        for tag in tags:
            self._state[tag] = Residency.ASLEEP
            self._versions[tag] += 1
            self._dropped_weights |= tag == "weights"

    def woke(self, tags: Iterable[str]) -> None:
        """These tags are back; weights that were dropped are undefined until reloaded."""
        for tag in tags:
            undefined = tag == "weights" and self._dropped_weights
            self._state[tag] = Residency.WEIGHTS_UNDEFINED if undefined else Residency.AWAKE

    def begin_reload(self) -> None:
        """Weights are about to be overwritten, so they are undefined until :meth:`reloaded`; raise
        SleepStateError if they are not in memory.
        """
        state = self._state["weights"]
        if state in (Residency.ASLEEP, Residency.PARTIAL):
            raise SleepStateError(
                f"reload_weights needs weights in memory, they are {state.value}: "
                f"wake_up(tags=['weights']) first"
            )
        self._dropped_weights = True
        self._state["weights"] = Residency.WEIGHTS_UNDEFINED
        self._versions["weights"] += 1

    def reloaded(self) -> None:
        """All weights were loaded again."""
        self._dropped_weights = False
        self._state["weights"] = Residency.AWAKE

    def partial(self, tags: Iterable[str], *, weights_dropped: bool = False) -> None:
        """A change of these tags has begun or failed: they may differ over ranks."""
        self._dropped_weights |= weights_dropped
        for tag in tags:
            self._state[tag] = Residency.PARTIAL
            self._versions[tag] += tag == "kv_cache"
