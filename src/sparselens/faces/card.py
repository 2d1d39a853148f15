"""A feature's card as HTML that stands by itself, for notebooks. The page draws the same card in assets/features.js."""

from collections.abc import Callable, Mapping
from html import escape
from typing import Any

SHOWN, LOWER = 8, 5  # contexts
STYLE = "font:14px/1.5 system-ui,sans-serif;max-width:46em;border:1px solid #8886;border-radius:8px;padding:.8em 1em"
SOFT = "color:#777;font-size:12px"


def html(card: Mapping[str, Any], label_of: Callable[[int, int], str] | None = None) -> str:
    """Label, how often it fires, words, contexts. label_of: the labels of its nearest features."""
    label = escape(str(card.get("own") or card["label"]))
    top = list(card["top"])
    layer, feature, fits = (escape(str(card[name])) for name in ("layer", "feature", "fits"))
    of = escape(str(card.get("contexts", len(top))))  # some may have been left out of the card
    true = f", true of {fits} of {of} top contexts" if card["fits"] else ""
    head = (
        f"<div><b>{label}</b> "
        f"<span style='{SOFT}'>feature {feature} of layer {layer}{true}</span></div>"
        f"<div style='{SOFT}'>fires on {card['share']:.3%} of the tokens, mean {card['mean']:.3g}, "
        f"largest {card['largest']:.3g} {_bars(card['histogram'])}</div>"
    )
    rows = [_words("promotes", card["promoted"]), _words("suppresses", card["suppressed"])]
    near = ", ".join(_near(card["nearest"], label_of))
    rows.append(f"<div><span style='{SOFT}'>nearest</span> {near}</div>" if near else "")
    contexts = [_excerpt(one) for one in top[:SHOWN]]
    if lower := list(card["lower"])[:LOWER]:
        contexts += [f"<div style='{SOFT}'>weaker</div>", *map(_excerpt, lower)]
    return f"<div style='{STYLE}'>{head}{''.join(rows)}{''.join(contexts)}</div>"


def _words(name: str, words: Any) -> str:
    if not words:
        return ""
    shown = " ".join(f"<code>{escape(str(word).strip() or '␣')}</code>" for word, _ in words[:8])
    return f"<div><span style='{SOFT}'>{name}</span> {shown}</div>"


def _near(nearest: Any, label_of: Callable[[int, int], str] | None) -> list[str]:
    names = ((f"{layer}/{feature}", "" if label_of is None else f" {label_of(layer, feature)}")
             for layer, feature, _ in nearest[:3])  # fmt: skip
    return [escape(name + label) for name, label in names]


def _bars(histogram: Any) -> str:
    most = max([*histogram, 1])
    return "".join("▁▂▃▄▅▆▇█"[min(7, int(8 * count / most))] for count in histogram)


def _excerpt(one: Mapping[str, Any]) -> str:
    parts = []
    for text, level in zip(one["text"], one["activations"], strict=False):
        shown = escape(str(text).replace("\n", "↵"))
        shade = f"background:rgba(255,140,0,{min(int(level), 255) / 255:.2f})"
        parts.append(f"<span style='{shade}'>{shown}</span>" if level else shown)
    return f"<div style='white-space:pre-wrap'>{''.join(parts)}</div>"
