"""Indirect object: `When Mary and John went to the store, John gave a drink to` -> Mary. Corruption: fresh names."""

import random

from .registry import Pair, Words, register_task

NAMES = (
    "Mary", "John", "Tom", "James", "Anna", "Mark", "Paul", "David", "Emma", "Sarah", "Laura", "Peter", "Jack",
    "Alice", "Robert", "Michael", "Susan", "Linda", "Henry", "Kate", "Jane", "George", "Lucy", "Sam", "Ben", "Lily",
    "Max", "Amy", "Daniel", "Richard", "Thomas", "William", "Charles", "Andrew", "Simon", "Adam", "Rachel", "Maria",
    "Martin", "Helen",
)  # fmt: skip
PLACES = ("store", "park", "school", "garden", "station", "office", "beach", "house", "market", "library")
THINGS = ("drink", "book", "ball", "ring", "letter", "basket", "flower", "present", "map", "kiss")

# {a} and {b} in either order are introduced; {s} is the one who gives. {place} and {thing} are neutral.
TEMPLATES = (
    "When {a} and {b} went to the {place}, {s} gave a {thing} to",
    "Then, {a} and {b} went to the {place}. {s} gave a {thing} to",
    "Then, {a} and {b} had a lot of fun at the {place}. {s} gave a {thing} to",
    "Then, {a} and {b} were working at the {place}. {s} decided to give a {thing} to",
    "Then, {a} and {b} were thinking about going to the {place}. {s} wanted to give a {thing} to",
    "Then, {a} and {b} had a long argument, and afterwards {s} said to",
    "After {a} and {b} went to the {place}, {s} gave a {thing} to",
    "When {a} and {b} got a {thing} at the {place}, {s} decided to give it to",
    "While {a} and {b} were working at the {place}, {s} gave a {thing} to",
    "While {a} and {b} were commuting to the {place}, {s} gave a {thing} to",
    "After the lunch, {a} and {b} went to the {place}. {s} gave a {thing} to",
    "Afterwards, {a} and {b} went to the {place}. {s} gave a {thing} to",
    "The {place} {a} and {b} went to had a {thing}. {s} gave it to",
    "Friends {a} and {b} found a {thing} at the {place}. {s} gave it to",
    "Yesterday {a} and {b} met at the {place}, and {s} handed a {thing} to",
)


def pair(rng: random.Random, words: Words, template: str) -> Pair:
    giver, receiver, *fresh = rng.sample(words.alike(NAMES), 5)
    first, second = (receiver, giver) if rng.random() < 0.5 else (giver, receiver)
    fill = {"place": rng.choice(PLACES), "thing": rng.choice(THINGS)}
    clean = template.format(a=first, b=second, s=giver, **fill)
    corrupted = template.format(a=fresh[0], b=fresh[1], s=fresh[2], **fill)
    return Pair(clean, corrupted, f" {receiver}", f" {giver}")


@register_task("ioi")
def ioi(rng: random.Random, words: Words) -> Pair:
    return pair(rng, words, rng.choice(TEMPLATES))
