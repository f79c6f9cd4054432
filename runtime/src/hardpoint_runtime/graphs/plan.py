"""The plan of graphs: every graph that some batch would replay, and no other.

A plan is made before warm-up and never changes: a step whose graph is not in it runs eagerly.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Self

from attrs import frozen
from hardpoint.errors import PluginError
from hardpoint.isolation import text_of

from hardpoint_runtime.graphs.keys import BatchKey, KeyRules, make_key
from hardpoint_runtime.graphs.modes import GraphMode
from hardpoint_runtime.graphs.policy import DispatchPolicy
from hardpoint_runtime.graphs.sizes import CaptureSizes


@frozen(kw_only=True)
class Capture:
    """One graph to make: in a FULL or PIECEWISE run of a batch of this key."""

    mode: GraphMode
    key: BatchKey


Kind = tuple[int, bool, int]
"""What batches of one choice share: padded tokens, whether they are uniform, the adapter case."""


@frozen(kw_only=True)
class GraphPlan:
    """Which graphs there are, and which ones a batch may take. Made by :meth:`make`.

    ``mode`` is the resolved one. ``padding[n]`` is the size of a batch of n tokens, None: eager;
    longer ones than it knows are eager too. ``choices`` are the graphs that serve a kind of batch,
    the preferred first; ``graphs`` are all of them. ``any_shape``: the one graph is a program,
    which serves every batch up to its own size unpadded.
    """

    mode: GraphMode
    rules: KeyRules
    padding: tuple[int | None, ...]
    choices: Mapping[Kind, tuple[Capture, ...]]
    graphs: frozenset[Capture]
    any_shape: bool = False

    @classmethod
    def make(
        cls,
        mode: GraphMode,
        sizes: CaptureSizes,
        rules: KeyRules,
        *,
        policy: DispatchPolicy | None = None,
        max_num_batched_tokens: int,
    ) -> Self:
        """Make the plan of an engine whose steps have up to ``max_num_batched_tokens`` tokens.

        A graph is planned if some batch, everything allowed, takes it. Raises PluginError for a
        policy whose answers cannot be followed.
        """
        policy = DispatchPolicy() if policy is None else policy
        padding: tuple[int | None, ...] = (None,)
        if mode is not GraphMode.NONE:
            sizes = _policy_sizes(policy, sizes, max_num_batched_tokens)
            most = min(sizes.largest, max_num_batched_tokens)
            padding += tuple(_policy_pad(policy, n, sizes) for n in range(1, most + 1))
        options = {kind: _options(policy, mode, rules, kind) for kind in _kinds(rules, padding)}
        graphs = frozenset(captures[0] for captures in options.values() if captures)
        choices = {
            kind: tuple(capture for capture in captures if capture in graphs)
            for kind, captures in options.items()
        }
        return cls(mode=mode, rules=rules, padding=padding, choices=choices, graphs=graphs)

    @classmethod
    def eager(cls) -> Self:
        """Return the plan without graphs."""
        rules = KeyRules(max_num_seqs=1)
        return cls(
            mode=GraphMode.NONE, rules=rules, padding=(None,), choices={}, graphs=frozenset()
        )

    @classmethod
    def of_program(cls, *, max_num_seqs: int, max_num_batched_tokens: int) -> Self:
        """Return the plan of a device that lowers the model to one program
        (:mod:`hardpoint_runtime.graphs.programs`).
        """
        largest = Capture(mode=GraphMode.FULL, key=BatchKey(num_tokens=max_num_batched_tokens))
        return cls(
            mode=GraphMode.FULL,
            rules=KeyRules(max_num_seqs=max_num_seqs),
            padding=(None,),
            choices={},
            graphs=frozenset({largest}),
            any_shape=True,
        )

    def serving(self, num_tokens: int, active_loras: int, *, uniform: bool) -> tuple[Capture, ...]:
        """Return the graphs that serve such a batch, the preferred first."""
        if self.any_shape:
            fits = num_tokens <= self.largest and not active_loras
            return (Capture(mode=GraphMode.FULL, key=BatchKey(num_tokens=num_tokens)),) * fits
        size = self.padding[num_tokens] if num_tokens < len(self.padding) else None
        case = self.rules.lora_case(active_loras)
        if size is None or case is None:
            return ()
        return self.choices.get((size, uniform, case), ())

    def captures(self) -> tuple[Capture, ...]:
        """Return the graphs in the order in which to make them: PIECEWISE before FULL, larger ones
        first, so that the smaller find the memory of the larger in the pool.
        """
        return tuple(sorted(self.graphs, key=_capture_order))

    @property
    def largest(self) -> int:
        """The most tokens of any graph: what static buffers must hold; 0 without graphs."""
        return max((each.key.num_tokens for each in self.graphs), default=0)


def _capture_order(capture: Capture) -> tuple[bool, int, bool, int]:
    key = capture.key
    return capture.mode is GraphMode.FULL, -key.num_tokens, key.uniform, -key.active_loras


def _kinds(rules: KeyRules, padding: Sequence[int | None]) -> set[Kind]:
    """Return the kinds that some batch is of."""
    kinds = set()
    for num_tokens, size in enumerate(padding):
        for uniform in (False, True) if size is not None else ():
            reqs = _most_requests(rules, num_tokens, uniform=uniform)
            for active in range(min(reqs, rules.lora_cases[-1]) + 1) if reqs else ():
                case = rules.lora_case(active)
                if size is not None and case is not None:
                    kinds.add((size, uniform, case))
    return kinds


def _options(
    policy: DispatchPolicy, mode: GraphMode, rules: KeyRules, kind: Kind
) -> tuple[Capture, ...]:
    """Return the graphs that would serve batches of ``kind`` in an engine of ``mode``."""
    size, uniform, case = kind
    own = uniform and mode.separate_decode
    return tuple(
        Capture(mode=each, key=make_key(each, size, uniform=own, active_loras=case, rules=rules))
        for each in _policy_modes(policy, size, uniform=uniform)
        if (uniform and each is mode.decode) or each is mode.mixed
    )


def _most_requests(rules: KeyRules, num_tokens: int, *, uniform: bool) -> int:
    """Return how many requests such a batch has at most; 0 if there is none."""
    query = rules.uniform_query
    if uniform:
        reqs, rest = divmod(num_tokens, query)
        return reqs if not rest and reqs <= rules.max_num_seqs else 0
    reqs = min(num_tokens, rules.max_num_seqs)
    if reqs == num_tokens and query == 1:
        reqs -= 1  # one token for each is uniform
    if reqs == 1 and num_tokens == query:
        reqs = 0
    return reqs


def _policy_sizes(policy: DispatchPolicy, sizes: CaptureSizes, most: int) -> CaptureSizes:
    answer = _listed(policy, "sizes", _asked(policy, "sizes", sizes.sizes))
    if wrong := [size for size in answer if type(size) is not int or size < 1]:
        raise _misled(policy, f"sizes gave {wrong[0]!r}, which is no positive number of tokens")
    return CaptureSizes(size for size in answer if size <= most)


def _policy_pad(policy: DispatchPolicy, num_tokens: int, sizes: CaptureSizes) -> int | None:
    answer = _asked(policy, "pad", num_tokens, sizes)
    if answer is None:
        return None
    if type(answer) is not int or answer < num_tokens or answer not in sizes.sizes:
        raise _misled(
            policy,
            f"pad({num_tokens}) gave {answer!r}: it must be one of the sizes {list(sizes.sizes)} "
            f"and at least {num_tokens}, or None",
        )
    found: int = answer
    return found


def _policy_modes(policy: DispatchPolicy, size: int, *, uniform: bool) -> tuple[GraphMode, ...]:
    answer = _listed(policy, "modes", _asked(policy, "modes", size, uniform=uniform))
    if wrong := [each for each in answer if not isinstance(each, GraphMode) or not each.is_single]:
        raise _misled(policy, f"modes({size}) gave {wrong[0]!r}; a step runs in FULL or PIECEWISE")
    return answer[: answer.index(GraphMode.NONE)] if GraphMode.NONE in answer else answer


def _asked(policy: DispatchPolicy, question: str, *args: object, **kwargs: object) -> Any:
    """Return what a policy answers. Raises PluginError for whatever it raises."""
    try:
        return getattr(policy, question)(*args, **kwargs)
    except Exception as error:
        kind = type(error).__name__
        raise _misled(policy, f"{question} raised {kind}: {text_of(error)}") from error


def _listed(policy: DispatchPolicy, question: str, answer: object) -> tuple[Any, ...]:
    if isinstance(answer, str) or not isinstance(answer, Iterable):
        raise _misled(policy, f"{question} gave {answer!r}, which is no sequence")
    return tuple(answer)


def _misled(policy: DispatchPolicy, what: str) -> PluginError:
    kind = type(policy)
    return PluginError(f"graph policy {kind.__module__}.{kind.__qualname__}: {what}")
