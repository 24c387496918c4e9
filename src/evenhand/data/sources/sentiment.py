"""Sentiment of 23,700 short texts in four domains (Hutto and Gilbert 2014), rated by people."""

from __future__ import annotations

import math

import numpy as np
import torch

from evenhand import _validate
from evenhand.data.columns import Text
from evenhand.data.owners_and_groups import grouped
from evenhand.data.sources.base import File, Loaded, Place, Source, classified, damaged, divided, held_out

HELD_OUT = 0.2
LENGTH = 384
"""Bytes of a text: one in two thousand is longer and is cut."""
LABELS = ("negative", "positive")
FILES = {
    "tweets": "tweets_GroundTruth.txt",
    "movie reviews": "movieReviewSnippets_GroundTruth.txt",
    "product reviews": "amazonReviewSnippets_GroundTruth.txt",
    "editorials": "nytEditorialSnippets_GroundTruth.txt",
}
DOMAINS = tuple(FILES)


def sentiment(place: Place, split_seed: int = 0) -> Loaded:
    """Read texts as 384 bytes of UTF-8 each, padded with 0; label: rated above 0; groups are the four domains.

    A fifth is held out, by a hash of the text and a public seed: equal texts are on the same side. Use it with
    ``--features minilm`` or ``--model char_lstm``.
    """
    rows = [(domain, *row) for domain, file in FILES.items() for row in _rated(place, file)]
    texts = [text for _, _, text in rows]
    codes = np.array([rating > 0 for _, rating, _ in rows], dtype=np.int64)
    data = classified(torch.from_numpy(Text(LENGTH).encode("text", texts, set())), codes, LABELS)
    data = grouped(data, [domain for domain, _, _ in rows], DOMAINS)
    return divided(data, held_out(texts, HELD_OUT, _validate.whole(split_seed, "split_seed", low=0)))


def _rated(place: Place, file: str) -> list[tuple[float, str]]:
    """Return mean rating (-4 to 4) and text of every line: id, rating, text, separated by tabs."""
    lines = [line.split("\t", 2) for line in place.text(file).split("\n") if line.strip()]
    try:
        pairs = [(float(rating), text.strip()) for _, rating, text in lines]
    except ValueError:
        raise damaged(place.path(file), "a table of id, rating and text") from None
    if not pairs or not all(math.isfinite(rating) and abs(rating) <= 4 for rating, _ in pairs):
        raise damaged(place.path(file), "a table with ratings from -4 to 4")
    return pairs


SENTIMENT = Source(
    "sentiment",
    sentiment,
    records="about 23,700, a fifth of them held out",
    groups="tweets, movie reviews, product reviews, editorials",
    licence="MIT (cite Hutto and Gilbert 2014)",
    files=(tuple(File(name) for name in FILES.values()),),
    hint="They are in vaderSentiment on GitHub (cjhutto), additional_resources/hutto_ICWSM_2014.",
)
