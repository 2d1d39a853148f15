"""Labels from facts about words."""

import pytest

from sparselens.faces.labels import Background, Context, _score, facts, label, shares

PLAIN = ["Once", " upon", " a", " time", " there", " was", " a", " small", " dog", "."]


def contexts(*texts):
    """Texts with the strongest token in [brackets], tokens between bars."""
    made = []
    for place, text in enumerate(texts, 20):
        pieces = text.split("|")
        at = next(i for i, piece in enumerate(pieces) if piece.strip().startswith("[") and piece.endswith("]"))
        pieces[at] = pieces[at].replace("[", "").replace("]", "")
        made.append(Context(pieces, at, place))
    return made


def labelled(*texts, promoted=()):
    found = [facts(one) for one in contexts(*texts)]
    background = Background()
    for at in range(1, len(PLAIN)):  # ordinary text, in which nothing stands out
        background.add(shares([facts(Context(PLAIN, at, 20))]))
    return label(found, background, promoted)


@pytest.mark.parametrize(
    "texts, expected",
    [
        (("The| ball| was| [red]", "A| [red]| car", "Her| dress| is| [red]"), "the word “red”"),
        (("He| is| walk|[ing]", "She| was| sing|[ing]", "They| are| jump|[ing]"), "the piece “ing”"),
        (("He| has| [12]| cats", "at| [7]| o", "all| [31]| days"), "numbers"),
        (("the| year| [1987]", "since| [2003]", "until| [1912]"), "years"),
        (('He| said|,| "|[Go]', 'She| said|,| "|[What]', 'Ben| said|,| "|[No]'), "after an opening quote"),
        (("now| [Tom]| ran", "but| [Sue]| sat", "then| [Ben]| ate"), "names"),
        (("Tom| ran| and| [Tom]| fell", "Sue| sat| and| [Sue]| ate", "Ben| saw| that| [Ben]| won"),
         "names, second mention"),
        (("a| [red]| hat", "a| [blue]| hat", "a| [green]| hat"), "colours"),
        (("one| [,]| two", "red| [,]| blue", "he| [,]| she"), "the mark “,”"),
        (("I| was| [quickly]", "she| [slowly]", "we| [sadly]| left"), "words in -ly"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_labels(texts, expected):
    found = labelled(*texts)
    assert expected in found.text, found
    assert found.fits == len(texts)


def test_start_of_the_text():
    found = [facts(Context(["<s>", "Once"], 0, 0)), facts(Context(["<s>", "The"], 0, 0))]
    assert label(found, Background()).text.startswith("the start of the text")


def test_several_words_and_none():
    both = labelled("so| [big]| a", "how| [large]| it", "very| [big]", "most| [large]")
    assert set(both.text.split(", ")) == {"“big”", "“large”"}
    mixed = labelled("so| [apple]", "|| [run]", "and| [Sue]", "12| [.]")
    assert mixed.text.startswith("mixed: ") and mixed.fits == 0
    spaced = [{f"the piece “{text}”": 1.0} for text in ("of the", "a", "b", "c")]
    assert label(spaced, Background()).text.startswith("mixed: “of the”, "), "pieces may have spaces inside"
    assert (
        labelled("so| [apple]", "|| [run]", "and| [Sue]", "12| [.]", promoted=[(" cat", 9.0)]).text == "promotes “cat”"
    )
    assert label([], Background()).text == "fired nowhere"


def test_what_most_contexts_share_and_others_lack_wins():
    """A word that every feature fires on says less than a rarer one beside it."""
    background = Background()
    for _ in range(50):
        background.add({"the word “the”": 1.0})
    found = [{"the word “the”": 1.0, "after “of”": 0.9}] * 5
    assert label(found, background).text == "after “of”"
    assert label(found, Background()).text.startswith("the word “the”")


def test_fixed_forms_are_told_by_their_places():
    texts = [["3", "6", "+", digit, "8", "=", "?"] for digit in "125790"]
    found = [facts(Context(pieces, 6, 6)) for pieces in texts]
    background = Background()
    background.add({"the mark “?”": 1.0, "token 6 of the text": 1.0, "after “=”": 1.0, "“+” at token 2": 1.0})
    assert {"“3” at token 0", "“6” at token 1"} & set(label(found, background).text.split(", "))


@pytest.mark.parametrize("n", [4, 3])
def test_texts_have_one_form_if_four_of_five_end_at_the_same_token(n):
    found = [{"token 3 of the text": 0.8, "“+” at token 1": 0.85}] * n + [{"“+” at token 1": 0.85}] * (5 - n)
    assert ("“+” at token 1" in label(found, Background()).text) == (n == 4)


def test_a_fact_that_every_feature_has_says_nothing():
    background = Background()
    assert background.rate("x") == 0
    for fact in ("x", "x", "y"):
        background.add({fact: 1.0})
    assert background.rate("x") == pytest.approx(2 / 3)
    assert _score(1.0, 1.0, 1.0) == pytest.approx(0)
    assert _score(1.0, 0.5, 1.0) == pytest.approx(4 * _score(0.5, 0.5, 1.0))


@pytest.mark.parametrize("n, text, fits", [(4, "after “of”", 4), (3, "mostly after “of”", 3)])
def test_four_of_five_are_sure(n, text, fits):
    """Three of five are most; fewer than half are nothing."""
    found = [{"after “of”": 0.9}] * n + [{"names": 0.9}] * (5 - n)
    assert label(found, Background()) == (text, fits)


def test_few_words_stand_for_the_contexts_that_have_any_of_them():
    words = ["a", "a", "b", "b", "c", "c", "d", "e"]
    found = [{f"the word “{word}”": 1.0} for word in words]
    assert label(found, Background()) == ("“a”, “b”, “c”", 6), "three at most, and only those seen twice"
    assert label(found[:-2], Background()) == ("“a”, “b”, “c”", 6)
    rare = [{f"the word “{word}”": 1.0} for word in "abcdef"]
    assert label(rare, Background()) == ("mixed: “a”, “b”, “c”", 0)


@pytest.mark.parametrize("z, text", [(8.0, "names, promotes “cat”"), (7.9, "names")])
def test_a_word_is_named_that_is_promoted_by_eight_deviations(z, text):
    assert label([{"names": 0.9}] * 3, Background(), [(" cat", z), (" dog", 7.0)]).text == text


def test_a_sure_fact_comes_before_a_list_of_words():
    """True of just four in five, while two words cover as much."""
    found = [{f"the word “{word}”": 1.0, "after “of”": 0.9} for word in "aabb"] + [{"the word “c”": 1.0}]
    assert label(found, Background()).text == "after “of”"
    assert label([*found, {"the word “a”": 1.0}], Background()).text == "“a”, “b”", "of four in six it is not"


@pytest.mark.parametrize("word, told", [("sadly", True), ("ably", False), ("be-ly", False)])
def test_endings_of_words_of_five_letters_or_more(word, told):
    assert ("words in -ly" in facts(Context([" " + word], 0))) == told


@pytest.mark.parametrize("word, told", [("NASA", True), ("Tom", False), ("UK", False)])
def test_capitals_are_all_of_a_longer_word(word, told):
    assert ("capitals" in facts(Context(["to", " " + word], 1))) == told


def test_places_are_counted_from_the_token_behind_the_first():
    found = facts(Context(["<s>", "Once", " upon"], 1, 1))
    assert "token 1 of the text" in found and "the start of the text" not in found
    start = facts(Context(["<s>", "Once"], 0, 0))
    assert "the start of the text" in start and "token 0 of the text" not in start
    assert not any("of the text" in fact for fact in facts(Context(["a", " b"], 1)))


@pytest.mark.parametrize("left, kind", [("", "opening"), ("he said ", "opening"), ("so (", "opening"),
                                        ("(so", "closing"), ("well,", "closing"), ("one—", "opening")])  # fmt: skip
def test_quotes_are_told_by_what_stands_before_them(left, kind):
    assert f"{kind} quotes" in facts(Context([left, '"'], 1))


@pytest.mark.parametrize("text, word, part", [
    ("He| is| walk|[ing]", "walking", "end"), ("He| is| [walk]|ing", "walking", "beginning"),
    ("a| [x]|ylo|phone|.", "xylophone", "beginning"), ("[x]|ylo|phone", "xylophone", "beginning"),
    ("un|[break]|able", "unbreakable", "beginning"),
])  # fmt: skip
def test_pieces_know_their_word(text, word, part):
    (context,) = contexts(text)
    found = facts(context)
    assert f"in the word “{word}”" in found and f"the {part} of a word" in found
    assert not {"the end of a word", "the beginning of a word"} - {f"the {part} of a word"} & set(found)
