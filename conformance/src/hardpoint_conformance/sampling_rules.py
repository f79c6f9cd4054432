"""The rules of SamplingParams in numpy: what they make of logits, and what can be drawn then."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
from hardpoint.sampling_params import SamplingParams

LARGEST_BIAS = 100.0


def edited(
    logits: Any,
    params: SamplingParams,
    prompt: Sequence[int],
    output: Sequence[int],
    end_ids: Sequence[int] = (),
) -> Any:
    """Return one row of logits as ``params`` change it: allowed ids, bad words, least length, bias,
    then penalties (repetition over prompt and output, frequency and presence over the output).
    """
    row = np.array(logits, dtype=np.float64)
    if params.allowed_token_ids is not None:
        row[np.setdiff1d(np.arange(len(row)), params.allowed_token_ids)] = -np.inf
    for word in params.bad_word_ids:
        if tuple(output[len(output) - len(word) + 1 :]) == word[:-1]:
            row[word[-1]] = -np.inf
    if len(output) < params.min_tokens:
        row[[*params.stop_token_ids, *(() if params.ignore_eos else end_ids)]] = -np.inf
    for token, bias in (params.logit_bias or {}).items():
        row[token] += np.clip(bias, -LARGEST_BIAS, LARGEST_BIAS)
    counts = Counter(output)
    for token in {*prompt, *output}:
        factor = params.repetition_penalty
        row[token] = row[token] / factor if row[token] > 0 else row[token] * factor
    for token, count in counts.items():
        row[token] -= count * params.frequency_penalty + params.presence_penalty
    return row


def chances(row: Any, params: SamplingParams) -> Any:
    """Return the probability of each token under temperature, min-p, top-k and top-p, in that
    order. ``row`` is edited already.
    """
    scaled = np.exp((row - row.max()) / params.effective_temperature)
    scaled[scaled < params.min_p] = 0
    order = np.argsort(-scaled, kind="stable")
    if params.top_k > 0:
        scaled[order[params.top_k :]] = 0
    shares = scaled / scaled.sum()
    before = np.concatenate([[0.0], np.cumsum(shares[order])[:-1]])
    scaled[order[before >= params.top_p]] = 0
    return scaled / scaled.sum()
