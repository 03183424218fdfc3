"""Prompts of our own words for the benchmarks: what a small instruct model can really do."""

from __future__ import annotations

import math

_REPORT = (
    "The harbour library opened its new reading room on Monday. The room has forty seats, two "
    "long oak tables and a glass roof that faces the old lighthouse. Mrs Adler, who has run the "
    "library since 2009, said that the room cost less than planned, because the tables were "
    "made by students of the trade school. The town council paid for the roof, and the "
    "fishing club gave the lamps. On the first day more than two hundred people came, most "
    "of them families with children. The library will keep the room open until nine in the "
    "evening from Tuesday to Saturday. On Sundays a group of volunteers will read stories to "
    "children in the reading room. Mrs Adler hopes that the reading room will bring back "
    "readers who had stopped coming when the old building was closed for repairs. The next "
    "step is a small garden between the library and the lighthouse, which the trade school will "
    "plan together with the fishing club."
)

SUMMARIZE = (
    "Summarize the following report. Keep the names, and quote the report's own sentences where "
    f"you can.\n\n{_REPORT}"
)
"""A summary that quotes: the output repeats parts of the prompt."""

_MISSPELLED = (
    _REPORT.replace("forty", "fourty").replace("families", "familys").replace("evening", "evning")
)

EDIT = f"Rewrite this text. Correct the spelling mistakes and change nothing else.\n\n{_MISSPELLED}"
"""An edit: the output repeats the prompt but for a few words."""

CHAT = "Tell me about a long walk through a forest in autumn."
"""Free writing: little in the output is known from the prompt."""


def as_chat(text: str) -> list[dict[str, str]]:
    """Return a prompt as the user's chat message."""
    return [{"role": "user", "content": text}]


_TOPICS = (
    "a lighthouse",
    "the first snow",
    "a small bakery",
    "an old bicycle",
    "a river in spring",
    "a night train",
    "a market at noon",
    "a broken clock",
    "a kitchen garden",
    "a mountain hut",
    "a lost letter",
    "an empty theatre",
    "a ferry in fog",
    "a beehive",
    "a chess game",
    "a storm at sea",
    "a glass blower",
    "a desert road",
    "a school choir",
    "a paper kite",
    "a tea house",
    "an old map",
    "a winter harbour",
    "a clay pot",
    "a village well",
    "a stone bridge",
    "a puppet maker",
    "a rainy station",
    "a field of rye",
    "a blue door",
    "a lost dog",
    "a radio tower",
    "a wooden boat",
    "an orchard in autumn",
    "a street musician",
    "a library at night",
    "a mill by the water",
    "a carpenter",
    "a frozen lake",
    "a rooftop garden",
    "a postman",
    "a travelling circus",
    "a cave by the sea",
    "a silver spoon",
    "a shepherd",
    "a garden wall",
    "a telescope",
    "a fishing net",
    "a chimney sweep",
    "a box of buttons",
    "a canal lock",
    "a hot spring",
    "a tailor",
    "an abandoned mine",
    "a wheat harvest",
    "a bell tower",
    "a birch forest",
    "a toy train",
    "a vineyard",
    "a ship in a bottle",
    "a tram at dawn",
    "a pottery class",
    "a dry riverbed",
    "a swarm of starlings",
    "a cup of coffee",
    "a snow plough",
    "a treehouse",
    "a windmill",
    "a botanist",
    "an island ferry",
    "a violin",
    "a summer fair",
    "a candle maker",
    "a night watchman",
    "a walled town",
    "a grain of sand",
    "a cable car",
    "a beekeeper's daughter",
    "a salt marsh",
    "a house on stilts",
    "a copper kettle",
    "a moth",
    "a ferryman",
    "a glacier",
    "a garden shed",
    "a weather station",
    "a lantern",
    "a juggler",
    "a mosaic floor",
    "a hay cart",
    "a mountain pass",
    "a sundial",
    "a fox den",
    "a cellar",
    "a coral reef",
    "a locksmith",
)

KINDS = ("copy", "summarize", "chat", "write", "change")
"""Kinds of work, from what repeats the prompt to what does not, and one that changes midway."""

FEW_PROMPTS = 16
"""Enough for one request at a time."""

MOST_PROMPTS = len(_TOPICS)
"""Enough for many at once, each its own."""


def prompts_of(kind: str, num: int) -> list[list[dict[str, str]]]:
    """Return ``num`` chat prompts of one kind: all different about topics, 54 about the report.

    Args:
        kind: One of ``KINDS``.
        num: At most ``MOST_PROMPTS``.
    """
    sentences = [f"{sentence.strip()}." for sentence in _REPORT.split(".") if sentence.strip()]
    prompts = []
    for index, topic in enumerate(_TOPICS[:num]):
        turned = _turned(sentences, index)
        text = {
            "copy": "Repeat this text word for word and add nothing.\n\n" + " ".join(turned[:5]),
            "summarize": "Summarize this report in its own words.\n\n" + " ".join(turned[:7]),
            "chat": f"Name three things one should know about {topic}, and say why.",
            "write": f"Write a story about {topic} and two friends.",
            "change": "Repeat these two sentences word for word, then go on with a story of your "
            "own about them.\n\n" + " ".join(turned[:2]),
        }[kind]
        prompts.append(as_chat(text))
    return prompts


def _turned(sentences: list[str], index: int) -> list[str]:
    """The sentences turned round, or read in steps: 54 orders."""
    count = len(sentences)
    steps = [step for step in range(1, count) if math.gcd(step, count) == 1]
    step = steps[index // count % len(steps)]
    return [sentences[(index + number * step) % count] for number in range(count)]


LOOP = "The harbour, the river, the forest, the hill. " * 12
"""The beginning of a text that goes on repeating itself: the most that drafting can bring."""
