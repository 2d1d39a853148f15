"""Tasks with real and made-up tokenizers: lengths, answers, metrics, and the refusals."""

import json
import random

import pytest
import torch
from transformers import AutoTokenizer

from sparselens import tasks
from sparselens.data.batches import separator_id
from sparselens.tasks import Pair, Task, register_task
from sparselens.tasks.prompts import Prompts, Read, Rejected, build, collate, tokenize
from sparselens.tasks.registry import Words, piece


def character_tokenizer(
    characters: str = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789 .,:_()\"'-\n",
):
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.WordLevel({c: i for i, c in enumerate(characters)} | {"?": len(characters)}, unk_token="?"))
    made.pre_tokenizer = pre_tokenizers.Split(Regex("[\\s\\S]"), "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=made, unk_token="?")


@pytest.fixture(params=["gpt2", "stories15m", "characters"])
def tokenizer(request, shared):
    if request.param == "characters":
        return character_tokenizer()
    if not (shared / "models").is_dir():
        pytest.skip("no real tokenizers here")
    return AutoTokenizer.from_pretrained(
        shared / "models" / {"gpt2": "gpt2-tokenizer"}.get(request.param, request.param)
    )


@pytest.mark.parametrize("name", [name for name in tasks.names() if name != "addition"])
def test_every_task_with_every_tokenizer(name, tokenizer):
    prompts = build(tasks.find(name), tokenizer, 8, seed=1, say=lambda text: None)
    assert len(prompts) == 8
    assert (prompts.clean != prompts.corrupted).any(1).all()
    decided = (prompts.right >= 0).any(-1) & (prompts.wrong >= 0).any(-1)
    assert (decided & prompts.used).any(1).all()
    assert (prompts.position < prompts.lengths[:, None]).all()
    again = build(tasks.find(name), tokenizer, 8, seed=1, say=lambda text: None)
    assert torch.equal(prompts.clean, again.clean)


def test_ioi_has_fifteen_templates_in_both_orders():
    from sparselens.tasks.ioi import TEMPLATES

    assert len(TEMPLATES) >= 15
    words, rng = Words(character_tokenizer()), random.Random(0)
    pairs = [tasks.find("ioi").generate(rng, words) for _ in range(40)]
    first = [pair.clean.find(pair.answer.strip()) < pair.clean.find(pair.wrong.strip()) for pair in pairs]
    assert any(first) and not all(first)


@pytest.mark.parametrize("distance", [40, 41])
def test_ioi_long_keeps_its_distance(distance):
    from sparselens.tasks.ioi_long import filler

    words = Words(AutoTokenizerStandIn())
    text = filler(random.Random(0), words, distance)
    assert words.count("the park." + text) - words.count("the park.") == distance


class AutoTokenizerStandIn:
    """Words and full stops are tokens."""

    bos_token = eos_token = None
    bos_token_id = eos_token_id = None

    def get_vocab(self):
        return {}

    def __call__(self, text, add_special_tokens=True):
        return {"input_ids": [hash(word) % 1000 for word in text.replace(".", " .").replace(",", " ,").split()]}


def with_specials(**specials: str):
    """The tokenizer of characters, with special tokens that it knows of but does not add."""
    made = character_tokenizer()
    made.add_special_tokens(specials)
    return made


def test_prompts_start_as_training_sequences_do():
    from tokenizers.processors import TemplateProcessing

    plain = character_tokenizer()("a b")["input_ids"]
    assert Words(character_tokenizer()).encode("a b") == plain, "no such token: nothing in front"
    for specials in ({"eos_token": "<|endoftext|>"}, {"bos_token": "<s>", "eos_token": "<|endoftext|>"},
                     {"bos_token": "<s>", "eos_token": "</s>"}, {"eos_token": "</s>"}):  # fmt: skip
        made = with_specials(**specials)
        first = "<|endoftext|>" if "<|endoftext|>" in made.get_vocab() else specials.get("bos_token", "</s>")
        front = made.convert_tokens_to_ids(first)
        assert made("a b")["input_ids"] == plain and front == separator_id(made)
        words = Words(made)
        assert words.encode("a b") == words.encode(f"{first}a b") == [front, *plain], "once"
        assert words.encode(first) == words.encode("") == [front]
        if made.bos_token not in (None, first):
            assert words.encode(f"{made.bos_token}a b") == [front, made.bos_token_id, *plain], "another start is none"
        assert words.encode(f"{first}{first}a b") == [front, front, *plain], "what was written is kept"
        assert words.count("a b") == 4 and words.after("a", words.encode("a"), " b") == plain[1:]
    for eos in ("</s>", "<|endoftext|>"):
        adds = with_specials(bos_token="<s>", eos_token=eos)
        adds.backend_tokenizer.post_processor = TemplateProcessing(
            single=f"<s> $A {eos}",
            special_tokens=[(token, adds.convert_tokens_to_ids(token)) for token in ("<s>", eos)],
        )
        assert adds("a b")["input_ids"] == [adds.bos_token_id, *plain, adds.eos_token_id]
        assert Words(adds).encode("a b") == [adds.bos_token_id, *plain], "its own first token, and no end"
        assert separator_id(adds) == adds.bos_token_id, "documents start with the same"


def test_answers_that_share_tokens_are_read_where_they_part():
    words = Words(character_tokenizer())
    item = tokenize(Pair("Tom gave it to", "Sam gave it to", " Alice", " Albert"), words)
    ids = words.encode(" Alice")
    assert [read.through for read in item.reads] == [*ids[:3], -1]
    assert item.clean[-3:] == tuple(ids[:3])  # the shared beginning is appended to both prompts
    assert item.reads[-1].right == (ids[3],) and item.reads[-1].position == len(item.clean) - 1


def test_greater_than_on_single_digits_is_the_probability_of_the_year():
    """Compare with the sum over all hundred two-digit continuations, enumerated."""
    words = Words(character_tokenizer())
    pair = Pair(
        "from 1732 to 17",
        "from 1701 to 17",
        tuple(f"{y:02}" for y in range(33, 100)),
        tuple(f"{y:02}" for y in range(33)),
    )
    prompts = collate([tokenize(pair, words)], "probability")
    assert prompts.position.shape == (1, 2)
    vocabulary = len(words.tokenizer)
    first, second = torch.randn(vocabulary), torch.randn(vocabulary)
    p1, p2 = first.softmax(-1), second.softmax(-1)  # p2: after the digit 3
    digit = [words.encode(str(d))[0] for d in range(10)]
    expected = sum(p1[digit[d]] for d in range(4, 10)) - sum(p1[digit[d]] for d in range(3))
    expected += p1[digit[3]] * (sum(p2[digit[d]] for d in range(3, 10)) - sum(p2[digit[d]] for d in range(3)))
    assert torch.allclose(prompts.score(torch.stack([first, second])[None]), expected[None], atol=1e-6)


def test_greater_than_with_two_digit_tokens(shared):
    if not (shared / "models").is_dir():
        pytest.skip("no real tokenizers here")
    tokenizer = AutoTokenizer.from_pretrained(shared / "models" / "gpt2-tokenizer")
    prompts = build(tasks.find("greater-than"), tokenizer, 16, say=lambda text: None)
    assert prompts.position.shape == (16, 1)  # one softmax decides
    assert ((prompts.right >= 0).sum(-1) + (prompts.wrong >= 0).sum(-1) == 100).all()


def test_logit_metric_takes_the_best_wrong_answer():
    words = Words(character_tokenizer())
    prompts = collate([tokenize(Pair("ab", "cd", "x", ("y", "z")), words)], "logit")
    logits = torch.zeros(1, 1, len(words.tokenizer))
    logits[0, 0, words.encode("x")[0]], logits[0, 0, words.encode("z")[0]] = 5.0, 2.0
    assert prompts.score(logits).item() == 3.0
    assert prompts.correct(prompts.score(logits)).all()


def test_logit_metric_is_the_mean_over_the_reads_that_decide():
    """Three decide, one of them with several answers; one has no wrong token, one is not there: neither counts."""
    prompts = Prompts(
        metric="logit", clean=torch.zeros(2, 5, dtype=torch.long), corrupted=torch.zeros(2, 5, dtype=torch.long),
        lengths=torch.tensor([5, 5]), position=torch.arange(5).expand(2, -1),
        right=torch.tensor([[[0, -1], [1, 2], [0, -1], [3, -1], [0, -1]], [[0, -1]] * 5]),
        wrong=torch.tensor([[[1, -1], [3, -1], [4, 5], [-1, -1], [1, -1]], [[5, 4]] * 5]),
        through=torch.full((2, 5), -1), used=torch.tensor([[True] * 4 + [False], [True] + [False] * 4]), pairs=(),
    )  # fmt: skip
    logits = torch.zeros(2, 5, 6)
    logits[0, 0, :2] = torch.tensor([4.0, 1.0])  # 3
    logits[0, 1, 1:4] = torch.tensor([2.0, 7.0, 1.0])  # 6, by the better of two right ones
    logits[0, 2, [0, 4, 5]] = torch.tensor([-1.0, 0.5, 2.0])  # -3, by the better of two wrong ones
    logits[0, 3, 3] = logits[0, 4, 0] = 100.0
    logits[1, 0, 0] = 0.5
    assert prompts.score(logits).tolist() == [2.0, 0.5]
    turned = prompts.score(torch.stack([logits, -logits]))  # -3, -1 and 1.5
    torch.testing.assert_close(turned, torch.tensor([[2.0, 0.5], [-2.5 / 3, -0.5]]))


def test_log_probability_without_wrong_answers():
    words = Words(character_tokenizer())
    prompts = collate([tokenize(Pair("ab", "cd", "xy"), words)], "log-probability")
    logits = torch.randn(1, 2, len(words.tokenizer))
    log_p = logits.log_softmax(-1)
    expected = log_p[0, 0, words.encode("x")[0]] + log_p[0, 1, words.encode("y")[0]]
    assert torch.allclose(prompts.score(logits), expected[None])


def test_answers_that_stand_in_the_prompt_are_read_there():
    """1234 against 1534: one read, at the second of the last four tokens; it settles, and leaves nothing open."""
    words = Words(character_tokenizer())
    item = tokenize(Pair("a:1234", "b:1234", "1234", "1534", filled=True), words)
    two, five = words.encode("2")[0], words.encode("5")[0]
    assert item.reads == (Read(3, (two,), (five,), -1),) and item.clean == tuple(words.encode("a:1234"))
    both = tokenize(Pair("a:1234", "b:1234", "1234", "2234", filled=True), words), item
    logits = torch.randn(2, 1, len(words.tokenizer))
    p, log_p = logits.softmax(-1)[:, 0], logits.log_softmax(-1)[:, 0]
    one = words.encode("1")[0]
    wanted = torch.stack([p[0, one] - p[0, two], p[1, two] - p[1, five]])
    torch.testing.assert_close(collate(list(both), "probability").score(logits), wanted)
    wanted = torch.stack([log_p[0, one], log_p[1, two]])
    torch.testing.assert_close(collate(list(both), "log-probability").score(logits), wanted)
    whole = tokenize(Pair("12", "34", "12", "13", filled=True), words)  # nothing but the answer
    assert whole.reads[0].position == 1
    for answer, wrong, reason in (("1234", "123", "differ in length"), ("1234567", "1234568", "differ in length"),
                                  ("1234", "1234", "are the same")):  # fmt: skip
        with pytest.raises(Rejected, match=reason):
            tokenize(Pair("a:1234", "b:1234", answer, wrong, filled=True), words)


def test_prompts_of_different_lengths_side_by_side():
    """One answer of two tokens, one of three that may be any; padding and missing reads are marked and do not count."""
    words = Words(character_tokenizer())
    a, b, x, y, z = (words.encode(c)[0] for c in "abxyz")
    long = tokenize(Pair("abab", "baba", "xy"), words)
    short = tokenize(Pair("ab", "ba", ("x", "y", "z")), words)
    prompts = collate([long, short], "log-probability")
    assert prompts.clean.tolist() == [[a, b, a, b, x], [a, b, 0, 0, 0]] and prompts.lengths.tolist() == [5, 2]
    assert prompts.corrupted.tolist() == [[b, a, b, a, x], [b, a, 0, 0, 0]]
    assert prompts.position[0].tolist() == [3, 4] and prompts.position[1, 0] == 1
    assert prompts.right.tolist() == [[[x, -1, -1], [y, -1, -1]], [[x, y, z], [-1, -1, -1]]]
    assert prompts.through.tolist() == [[x, -1], [-1, -1]] and (prompts.wrong == -1).all()
    assert prompts.used.tolist() == [[True, True], [True, False]]
    logits = torch.randn(2, 2, len(words.tokenizer))
    log_p = logits.log_softmax(-1)
    wanted = torch.stack([log_p[0, 0, x] + log_p[0, 1, y], log_p[1, 0, [x, y, z]].logsumexp(0)])
    torch.testing.assert_close(prompts.score(logits), wanted)
    logits[0, 0, x] = logits[0, 1, y] = logits[1, 0, z] = 100
    assert prompts.correct(prompts.score(logits), logits).tolist() == [True, True]
    logits[0, 0, y] = logits[1, 0, a] = 200
    assert prompts.correct(prompts.score(logits), logits).tolist() == [False, False]
    for answer in ("", ()):
        with pytest.raises(Rejected, match="an answer without tokens"):
            tokenize(Pair("ab", "ba", answer), words)
    with pytest.raises(Rejected, match="some longer than a token"):
        tokenize(Pair("ab", "ba", ("x", "yz")), words)
    some = prompts.take(torch.tensor([False, True]))
    assert some.clean.tolist() == prompts.clean[1:].tolist() and some.pairs == (short.pair,)


@pytest.mark.parametrize("first", [0, 1])
def test_token_0_is_a_token_like_any_other(first):
    """ab against ac, read through a, and a against b at once, where a is token 0 or token 1."""
    words = Words(character_tokenizer("abc xyz" if first == 0 else "xabc yz"))
    a, b, c = (words.encode(letter)[0] for letter in "abc")
    assert a == first
    logits = torch.randn(1, 2, 8)
    p, log_p = logits.softmax(-1)[0], logits.log_softmax(-1)[0]
    pair = Pair("x", "y", "ab", "ac")
    found = collate([tokenize(pair, words)], "probability").score(logits)
    torch.testing.assert_close(found[0], p[0, a] * (p[1, b] - p[1, c]))
    both = [tokenize(pair, words), tokenize(Pair("x", "y", "b", "c"), words)]  # of two reads and of one
    found = collate(both, "probability").score(logits.expand(2, -1, -1))
    for metric in ("logit", "probability", "log-probability"):  # several circuits at once, each by itself
        prompts, several = collate(both, metric), torch.randn(3, 2, 2, 8)
        torch.testing.assert_close(prompts.score(several), torch.stack([prompts.score(one) for one in several]))
    torch.testing.assert_close(found, torch.stack([p[0, a] * (p[1, b] - p[1, c]), p[0, b] - p[0, c]]))
    found = collate([tokenize(Pair("x", "y", "ab"), words)], "log-probability").score(logits)
    torch.testing.assert_close(found[0], log_p[0, a] + log_p[1, b])
    found = collate([tokenize(pair, words)], "logit").score(logits)
    torch.testing.assert_close(found[0], logits[0, 1, b] - logits[0, 1, c])
    for right, wrong, sign in (("a", "b", 1), ("b", "a", -1)):
        prompts = collate([tokenize(Pair("x", "y", right, wrong), words)], "logit")
        assert prompts.position.tolist() == [[0]]
        torch.testing.assert_close(prompts.score(logits[:, :1])[0], sign * (logits[0, 0, a] - logits[0, 0, b]))


@pytest.mark.parametrize(
    "pair, reason",
    [
        (Pair("abc", "ab", "x", "y"), "differ in length"),
        (Pair("abc", "abc", "x", "y"), "the same"),
        (Pair("abc", "abd", "x", "x"), "told apart"),
    ],
)
def test_bad_pairs_are_rejected(pair, reason):
    with pytest.raises(Rejected, match=reason):
        tokenize(pair, Words(character_tokenizer()))


def test_build_says_what_it_dropped_and_refuses_nothing():
    said = []
    mixed = Task("mixed", None, "logit", (Pair("abc", "ab", "x", "y"), Pair("abc", "abd", "x", "y")))
    assert len(build(mixed, character_tokenizer(), 5, say=said.append)) == 1
    assert "1 dropped (1 clean and corrupted prompt differ in length)" in said[0]
    with pytest.raises(ValueError, match="no usable pair"):
        build(Task("bad", None, "logit", (Pair("abc", "ab", "x", "y"),)), character_tokenizer(), 5, say=said.append)


def test_registry_takes_a_new_task_and_names_the_known_ones():
    @register_task("letters")
    def letters(rng, words):
        a, b = rng.sample("abcdefgh", 2)
        return Pair(f"say {a}", f"say {b}", a, b)

    said: list[str] = []
    assert len(build(tasks.find("letters"), character_tokenizer(), 4, say=said.append)) == 4 and len(said) < 2
    prompts = build(tasks.find("letters"), character_tokenizer(), 100, say=said.append)  # there are eight
    assert len(prompts) == len({pair.clean for pair in prompts.pairs}) == 8 and "8 pairs kept" in said[-1]
    said.clear()
    fixed = Task("fixed", None, "logit", tuple(Pair(f"say {a}-", "say z-", a, "z") for a in "abcdef"))
    for n in (5, 6, 9):
        assert len(build(fixed, character_tokenizer(), n, say=said.append)) == min(n, 6) and not said
    numbers = iter(range(10**6))
    endless = Task("endless", lambda rng, words: Pair(f"say {next(numbers) % 10**5}", "say", "a", "b"), "logit")
    with pytest.raises(ValueError, match="no usable pair"):
        build(endless, character_tokenizer(), 3, say=said.append)
    assert next(numbers) == 60, "twenty tries for each"
    made = Task(
        "made", lambda rng, words: Pair(f"say {next(numbers):05}", f"ask {next(numbers):05}", "a", "b"), "logit"
    )
    assert len(build(made, character_tokenizer(), 3, say=said.append)) == 3 and not said
    with pytest.raises(ValueError, match=r"unknown task 'ioy': expected one of .*ioi"):
        tasks.find("ioy")


def test_answers_without_their_space_are_told_with_both_tokens(tokenizer):
    def said_of(*built: Task) -> list[str]:
        said: list[str] = []
        for task in built:
            build(task, tokenizer, 12, say=said.append)
        return [line for line in said if "leading space" in line]

    def animals(space: str, end: str = "") -> Task:
        both = [("cat", "dog", "mat", "rug"), ("dog", "cat", "rug", "mat")]
        pairs = (Pair(f"The {a} sat on a{end}", f"The {b} sat on a{end}", space + c, space + d) for a, b, c, d in both)
        return Task("mine", None, "logit", tuple(pairs))

    words = Words(tokenizer)
    ids = words.encode("The cat sat on a")
    tokens = [
        [piece(tokenizer, words.after("The cat sat on a", ids, s + a)[0]) for s in ("", " ")] for a in ("mat", "rug")
    ]
    warnings = said_of(animals(""))
    if all(glued == apart for glued, apart in tokens):  # Llama's: a word on its own begins with its space
        assert not warnings
    else:
        (warning,) = warnings
        assert any(repr(glued) in warning and repr(apart) in warning for glued, apart in tokens)
        assert "2 of 2 pairs" in warning
    others = (tasks.find(name) for name in tasks.names() if name != "addition")
    assert not said_of(animals(" "), animals("", ' "'), *others), "right as they are"


def test_a_byte_order_mark_is_no_part_of_the_first_line(tmp_path):
    path = tmp_path / "mine.jsonl"
    path.write_text(json.dumps({"clean": "a b", "corrupted": "a c", "answer": " d", "wrong": " e"}), "utf-8-sig")
    assert tasks.find(path).pairs[0].clean == "a b"


def test_jsonl(tmp_path):
    path = tmp_path / "mine.jsonl"
    path.write_text(json.dumps({"clean": "abc", "corrupted": "abd", "answer": "x", "wrong": ["y", "z"]}) + "\n")
    found = tasks.find(str(path))
    assert found.metric == "logit" and found.pairs[0].wrong == ("y", "z") and found.name == "mine"
    path.write_text(json.dumps({"clean": "abc", "corrupted": "abd", "answer": "x"}) + "\n")
    assert tasks.find(path).metric == "log-probability"
    for line, message in (
        ("{", "not JSON"),
        ('{"clean": "a"}', "expected an object"),
        ('{"clean":"a","corrupted":"b","answer":3}', "must be a text"),
    ):
        path.write_text(line + "\n")
        with pytest.raises(ValueError, match=f"line 1: .*{message}|line 1: {message}|{message}"):
            tasks.find(path)
    with pytest.raises(ValueError, match="no such file"):
        tasks.find(tmp_path / "none.jsonl")
