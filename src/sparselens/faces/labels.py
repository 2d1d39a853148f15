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
    piece, text = pieces[at], pieces[at].strip()
    begins = at == 0 or piece[:1].isspace() or not left[-1:].isalnum()
    end = at + 1
    while end < len(pieces) and pieces[end][:1].isalpha() and piece[-1:].isalpha():
        end += 1
    whole = begins and end == at + 1
    found = {f"the word {_quoted(text.lower())}" if whole else f"the piece {_quoted(text)}": 1.0}
    first = at
    while first > 0 and pieces[first][:1].isalpha() and pieces[first - 1][-1:].isalpha():
        first -= 1
    word = "".join(pieces[first:end]).strip()
    if not whole:
        found["the end of a word" if end == at + 1 else "the beginning of a word"] = 0.8
        found[f"in the word {_quoted(word.lower())}"] = 1.0
    low = word.lower()
    if kind := _KIND.get(low):
        found[kind] = 0.95
    if low.isdigit():
        found["years" if len(low) == 4 and low[0] in "12" else "numbers"] = 0.95
    elif len(low) > 4 and low.isalpha():
        found[f"words in -{low[-3:]}"] = 0.85
        found[f"words in -{low[-2:]}"] = 0.75
    said = re.search(rf"(?<!\w){re.escape(word)}(?!\w)", left[: len(left) - len("".join(pieces[first:at]))])
    inside = "".join(pieces[:first]).rstrip()
    begun = not inside or inside[-1] in ENDS + EITHER + OPEN + CLOSE + ":"
    if word[:1].isupper() and len(word) > 1:
        found["the first word of a sentence" if begun else "names"] = 0.9
        if word.isupper() and len(word) > 2:
            found["capitals"] = 0.9
        if not begun and said:
            found["names, second mention"] = 1.05
    if said and low not in _PLAIN:
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
    worth = {fact: value for facts_of in found for fact, value in facts_of.items()}
    if not any(fact.startswith("token ") and n >= SURE for fact, n in shares(found).items()):
        # Which words stand at which places says something of texts that all have one form, such as sums.
        found = [{fact: value for fact, value in one.items() if " at token " not in fact} for one in found]
    ranked = sorted(
        ((_score(share, background.rate(fact), worth[fact]), fact, share) for fact, share in shares(found).items()
         if share >= SHARED), reverse=True,
    )  # fmt: skip
    words = Counter(fact for one in found for fact in one if fact.startswith(("the word", "the piece", "the mark")))
    if ranked and (ranked[0][2] >= SURE or not _few(words, len(found))):
        _, fact, share = ranked[0]
        text = fact if share >= SURE else f"mostly {fact}"
        return Label(_with(text, ranked[1:], fact, says), sum(fact in one for one in found))
    if few := _few(words, len(found)):
        text = ", ".join(dict.fromkeys(name.split(" ", 2)[2] for name in few))
        return Label(_with(text, [], "", says), sum(any(name in one for name in few) for one in found))
    if says:
        return Label(f"promotes {', '.join(says)}", 0)
    common = [name.split(" ", 2)[2] for name, _ in words.most_common(LISTED)]
    return Label("mixed: " + ", ".join(common) if common else "mixed", 0)


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
    if first.startswith(("the word", "the mark", "the piece")) or " at token " in first:
        text += "".join(f", {fact}" for fact in beside[: 2 if " at token " in first else 1])
    new = [word for word in says if word.lower() not in text.lower()]
    return text + (f", promotes {', '.join(new)}" if new else "")
