"""What the command line says of drafters comes to the options that the engine is given."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from foredraft.cli.drafter_options import drafter_options_of, read_scope
from foredraft.errors import ForedraftError
from foredraft.registry import PORTFOLIO_MEMBERS


def options(method: str, *others: str, **given: Any) -> dict[str, dict[str, Any]]:
    corpus, store = given.get("corpus", []), given.get("store")
    return drafter_options_of(method, given.get("draft_model"), corpus, store, list(others))


def test_every_option_of_a_method_can_be_given() -> None:
    assert options("lookahead", "window=8", "ngram_len=3") == {
        "lookahead": {"window": 8, "ngram_len": 3}
    }
    assert options("ngram", "min_hits=2") == {"ngram": {"min_hits": 2}}
    assert options("ngram") == options("none") == options("auto") == {}
    assert read_scope(None, "ngram") == "" and read_scope("me", "suffix") == "me"


def test_options_of_members_and_what_makes_them_members(tmp_path: Path) -> None:
    assert options("auto", "suffix.num_branches=2", store=tmp_path / "store") == {
        "auto": {"options": {"suffix": {"num_branches": 2, "store": str(tmp_path / "store")}}}
    }
    assert options("auto", "recycling.num_successors=4") == {
        "auto": {
            "members": (*PORTFOLIO_MEMBERS, "recycling"),
            "options": {"recycling": {"num_successors": 4}},
        }
    }
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    found = options("auto", "draft-model.max_depth=4", draft_model=str(model))
    assert found["auto"]["members"] == (*PORTFOLIO_MEMBERS, "draft-model")
    assert found["auto"]["options"]["draft-model"] == {"max_depth": 4, "model": str(model)}


WRONG: dict[str, tuple[str, list[str], dict[str, Any], str]] = {
    "no value": ("ngram", ["min_hits"], {}, "allowed is NAME=VALUE"),
    "no name": ("ngram", ["=3"], {}, "allowed is NAME=VALUE"),
    "no such method": ("auto", ["sufix.num_branches=2"], {}, "METHOD.NAME=VALUE"),
    "another method": ("ngram", ["suffix.num_branches=2"], {}, "the method is 'ngram'"),
    "plain": ("none", ["min_hits=2"], {}, "the method is 'none'"),
    "no such option": ("ngram", ["min_hit=2"], {}, "min_hit"),
    "not allowed": ("lookahead", ["window=0"], {}, "window is 0"),
    "text for a number": ("lookahead", ["window=wide"], {}, "window is 'wide'"),
    "no corpus": ("suffix", [], {"corpus": [Path("/no/such.txt")]}, "no such file"),
    "no draft model": ("draft-model", [], {}, "name one with --draft-model"),
    "no member's model": ("auto", ["draft-model.max_depth=4"], {}, "name one with --draft-model"),
    "a model for nobody": ("ngram", [], {"draft_model": "x"}, "change one of them"),
    "a store for nobody": ("ngram", [], {"store": Path("x")}, "change one of them"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_said_before_anything_is_loaded(case: str) -> None:
    method, others, given, said = WRONG[case]
    with pytest.raises(ForedraftError, match=said) as caught:
        options(method, *others, **given)
    assert "\n" not in str(caught.value)


def test_a_scope_is_for_suffix() -> None:
    with pytest.raises(ForedraftError, match="--suffix-scope is for --method suffix or auto"):
        read_scope("me", "ngram")
