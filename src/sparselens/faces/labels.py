"""A short label for a feature, made from where it fires: no model, a few facts about words. No torch.

1. `facts` of one context: what its strongest token is, what it follows, what was said before ("the word \"red\"",
   "names, second mention", "after an opening quote", "words in -ing", ...)
2. `Background` counts how common every fact is over the contexts of many features
3. `label` takes the fact that most of a feature's contexts share and few others have; where there is none, the two or
   three words it fires on; else what it promotes
"""

import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

OPEN, CLOSE, EITHER = "“‘«„", "”’»", "\"'"
ENDS = ".!?"
SHARED, SURE = 0.5, 0.8  # of the contexts: enough for a label, and enough to leave out "mostly"
SEVERAL = 0.7  # that two or three words must cover together
LISTED = 3
FIXED = 12  # first tokens of a text whose places are looked at
CLEAR = 8.0  # standard deviations over the vocabulary: a word so much promoted is named
NAMING = ("the word", "the piece", "the mark")  # facts that begin so name the strongest token itself
KINDS = {
    "pronouns": "i you he she it we they me him her us them his hers its their my your our mine yours theirs",
    "articles": "a an the", "conjunctions": "and or but nor so yet because if although while when than",
    "prepositions": "of in on at by for with from to into onto over under about after before between through "
    "against without within upon behind beside near above below across along around",
    "auxiliary verbs": "is are was were be been being am do does did have has had will would can could shall should "
    "may might must",
    "question words": "who what where when why how which whose whom",
    "negations": "not no never nothing nobody none cannot n't",
    "months": "january february march april may june july august september october november december",
    "days": "monday tuesday wednesday thursday friday saturday sunday",
    "colours": "red blue green yellow black white brown orange pink purple grey gray",
    "number words": "one two three four five six seven eight nine ten eleven twelve hundred thousand million",
    "family": "mother father mom dad mum mommy daddy mama papa brother sister son daughter grandma grandpa",
}  # fmt: skip
_KIND = {word: kind for kind, words in reversed(KINDS.items()) for word in words.split()}
_PLAIN = frozenset(
    word for kind in ("pronouns", "articles", "conjunctions", "prepositions", "auxiliary verbs") for word in
    KINDS[kind].split()
)  # fmt: skip


class Context(NamedTuple):
    """Tokens as text around a strongest one."""

    pieces: Sequence[str]
    at: int  # the strongest
    place: int = -1  # the strongest token's number in its document; -1: not known


class Label(NamedTuple):
    text: str
    fits: int  # of the strongest contexts


def facts(context: Context) -> dict[str, float]:
    """What can be said of a context, and how much a label that says it is worth."""
    pieces, at = context.pieces, context.at
    piece, before = pieces[at], pieces[at - 1] if at else ""
    text, left = piece.strip(), "".join(pieces[:at])
    found = {"the start of the text": 1.1} if context.place == 0 else {}
    if context.place > 0:
        found[f"token {context.place} of the text"] = 0.8
    for place in range(max(0, context.place - at), min(context.place, FIXED)):  # texts of one form, such as sums
        said_there = pieces[at - context.place + place].strip()
        if said_there and not said_there.startswith("<"):
            found[f"{_quoted(said_there)} at token {place}"] = 0.85
    if not text:
        found["line ends" if "\n" in piece else "spaces"] = 1.0
    elif any(c.isalnum() for c in text):
        found |= _word_facts(pieces, at, left)
    else:
        found[f"the mark {_quoted(text)}"] = 1.0
        if quote := _quote(piece, left):
            found[quote] = 1.05
    return found | _before_facts(before, "".join(pieces[: max(at - 1, 0)]), left)


def _word_facts(pieces: Sequence[str], at: int, left: str) -> dict[str, float]:
    text, (first, end) = pieces[at].strip(), _word_at(pieces, at)
    word = "".join(pieces[first:end]).strip()
    begins = at == 0 or pieces[at][:1].isspace() or not left[-1:].isalnum()
    if begins and end == at + 1:
        found = {f"the word {_quoted(text.lower())}": 1.0}
    else:
        found = {f"the piece {_quoted(text)}": 1.0}
        found["the end of a word" if end == at + 1 else "the beginning of a word"] = 0.8
        found[f"in the word {_quoted(word.lower())}"] = 1.0
    return found | _form_facts(word.lower()) | _text_facts(word, "".join(pieces[:first]))


def _word_at(pieces: Sequence[str], at: int) -> tuple[int, int]:
    """(first, end) of the pieces that make up the word."""
    first, end = at, at + 1
    while end < len(pieces) and pieces[end][:1].isalpha() and pieces[at][-1:].isalpha():
        end += 1
    while first > 0 and pieces[first][:1].isalpha() and pieces[first - 1][-1:].isalpha():
        first -= 1
    return first, end


def _form_facts(low: str) -> dict[str, float]:
    """What a word in small letters is, whatever stands around it."""
    found = {_KIND[low]: 0.95} if low in _KIND else {}
    if low.isdigit():
        found["years" if len(low) == 4 and low[0] in "12" else "numbers"] = 0.95
    elif len(low) > 4 and low.isalpha():
        found[f"words in -{low[-3:]}"] = 0.85
        found[f"words in -{low[-2:]}"] = 0.75
    return found


def _text_facts(word: str, before: str) -> dict[str, float]:
    """What a word is in its text: a name, a beginning, said before."""
    said = re.search(rf"(?<!\w){re.escape(word)}(?!\w)", before)
    inside, found = before.rstrip(), dict[str, float]()
    begun = not inside or inside[-1] in ENDS + EITHER + OPEN + CLOSE + ":"
    if word[:1].isupper() and len(word) > 1:
        found["the first word of a sentence" if begun else "names"] = 0.9
        if word.isupper() and len(word) > 2:
            found["capitals"] = 0.9
        if not begun and said:
            found["names, second mention"] = 1.05
    if said and word.lower() not in _PLAIN:
        found["a word said before"] = 0.85
    return found


def _before_facts(before: str, earlier: str, left: str) -> dict[str, float]:
    """What the strongest token follows, and what surrounds it."""
    text, found = before.strip(), dict[str, float]()
    if text and any(c.isalnum() for c in text):
        found[f"after {_quoted(text.lower())}"] = 0.9
        if text.isdigit():
            found["after a number"] = 0.85
    elif quote := _quote(before, earlier):
        found[f"after {'an' if quote[0] == 'o' else 'a'} {quote[:-1]}"] = 1.0
    elif text:
        found[f"after {_quoted(text)}"] = 0.9
    elif "\n" in before:
        found["after a line end"] = 0.9
    for word in {w.lower() for w in re.findall(r"[^\W\d_]{4,}", left)}:
        found.setdefault(f"near {_quoted(word)}", 0.6)
    return found


def _quote(piece: str, left: str) -> str | None:
    """Opening or closing quotes, told by what stands before them."""
    text = piece.strip()
    marks = [c for c in text if c in OPEN + CLOSE + '"']
    if not marks:
        return None
    mark = marks[-1]
    if mark in OPEN:
        return "opening quotes"
    if mark in CLOSE:
        return "closing quotes"
    before = (left + piece)[: (left + piece).rindex(mark)]
    return "opening quotes" if not before or before[-1].isspace() or before[-1] in "([—-" else "closing quotes"


def _quoted(text: str) -> str:
    return f"“{text}”"


class Background:
    """How common facts are, every feature counting alike."""

    def __init__(self) -> None:
        self.count: Counter[str] = Counter()
        self.n = 0

    def add(self, shares: dict[str, float]) -> None:
        self.count.update(shares)
        self.n += 1

    def rate(self, fact: str) -> float:
        return self.count[fact] / max(self.n, 1)


def shares(found: Sequence[dict[str, float]]) -> dict[str, float]:
    """The share of contexts that have each fact; facts of one context alone are left out, where there are others."""
    count = Counter(fact for facts_of in found for fact in facts_of)
    least = 1 if len(found) < 3 else 2
    return {fact: n / len(found) for fact, n in count.items() if n >= least}


def label(
    found: Sequence[dict[str, float]], background: Background, promoted: Iterable[tuple[str, float]] = ()
) -> Label:
    """What a feature is called, from the facts of its strongest contexts and the words it promotes (word, z)."""
    says = [_quoted(word.strip() or word) for word, z in promoted if z >= CLEAR][:2]
    if not found:
        return Label(f"promotes {', '.join(says)}, fired nowhere" if says else "fired nowhere", 0)
    found = _telling(found)
    ranked = _ranked(found, background)
    words = Counter(fact for one in found for fact in one if fact.startswith(NAMING))
    few = _few(words, len(found))
    if ranked and (ranked[0][2] >= SURE or not few):
        _, fact, share = ranked[0]
        text = fact if share >= SURE else f"mostly {fact}"
        return Label(_with(text, ranked[1:], fact, says), sum(fact in one for one in found))
    if few:
        text = ", ".join(dict.fromkeys(name.split(" ", 2)[2] for name in few))
        return Label(_with(text, [], "", says), sum(any(name in one for name in few) for one in found))
    return Label(f"promotes {', '.join(says)}" if says else _mixed(words), 0)


def _mixed(words: Counter[str]) -> str:
    common = [name.split(" ", 2)[2] for name, _ in words.most_common(LISTED)]
    return "mixed: " + ", ".join(common) if common else "mixed"


def _telling(found: Sequence[dict[str, float]]) -> Sequence[dict[str, float]]:
    """Which words stand at which places says something of texts that all have one form, such as sums; else left out."""
    if any(fact.startswith("token ") and n >= SURE for fact, n in shares(found).items()):
        return found
    return [{fact: value for fact, value in one.items() if " at token " not in fact} for one in found]


def _ranked(found: Sequence[dict[str, float]], background: Background) -> list[tuple[float, str, float]]:
    """(score, fact, share) of what enough contexts share, the most telling first."""
    worth = {fact: value for one in found for fact, value in one.items()}
    common = [(fact, share) for fact, share in shares(found).items() if share >= SHARED]
    return sorted(((_score(share, background.rate(fact), worth[fact]), fact, share) for fact, share in common),
                  reverse=True)  # fmt: skip


def _score(share: float, rate: float, worth: float) -> float:
    return worth * share * share * math.log((1 + 0.01) / (rate + 0.01))


def _few(words: Counter[str], n: int) -> list[str]:
    """Two or three words that are nearly all it fires on."""
    most = [name for name, count in words.most_common(LISTED) if count > 1]
    return most if sum(words[name] for name in most) >= SEVERAL * n else []


def _with(text: str, others: Sequence[tuple[float, str, float]], first: str, says: list[str]) -> str:
    """The label, what nearly always goes with it, and what it promotes."""
    beside = [
        fact
        for _, fact, share in others
        if share >= 0.9 and (fact.startswith(("after ", "token ")) or " at token " in fact)
    ]
    if first.startswith(NAMING) or " at token " in first:
        text += "".join(f", {fact}" for fact in beside[: 2 if " at token " in first else 1])
    new = [word for word in says if word.lower() not in text.lower()]
    return text + (f", promotes {', '.join(new)}" if new else "")
