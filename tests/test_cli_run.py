"""The commands that a person types: run, chat, sessions, demo."""

import json
import subprocess
import sys

import pytest

import model_folders
import zoo
from kvplane.cli import INTERRUPTED, REFUSED, main
from kvplane.cli.memory import check_memory
from kvplane.errors import MemoryUnavailable
from kvplane.integrations.transformers import loading
from kvplane.models.nano import heldout_text
from kvplane.pack import open_root, read_session, session_names

TEXT = heldout_text()[:700]


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    """Sessions go to a folder of the test's."""
    folder = tmp_path / "home"
    monkeypatch.setenv("KVPLANE_HOME", str(folder))
    return folder


@pytest.fixture
def said(capsys):
    """Run a command; its output, without what it notes on stderr."""

    def run(*arguments, code=0):
        assert code == main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        run.notes = captured.err
        return captured.out

    return run


def test_a_session_that_stops_and_goes_on_says_what_it_would_have_said(said):
    whole = said("run", TEXT, "--max-new-tokens", 60)
    first = said("run", TEXT, "--session", "notes", "--max-new-tokens", 30, "--stats")
    assert "saved session notes" in said.notes
    second = said("run", "--session", "notes", "--max-new-tokens", 30)

    assert whole.rstrip("\n") == first.removesuffix("\n") + second.removesuffix("\n")
    assert "731 of 731 tokens from session notes" in said.notes


def test_a_prompt_added_to_a_session_is_all_that_is_read(said):
    said("run", TEXT, "--session", "notes", "--max-new-tokens", 5)
    said("run", " More.", "--session", "notes", "--max-new-tokens", 5)

    assert "706 of 712 tokens from session notes" in said.notes


def test_a_file_is_read_before_the_prompt(said, tmp_path):
    file = tmp_path / "long.txt"
    file.write_text(TEXT, encoding="utf-8")

    assert said("run", TEXT + " The", "--max-new-tokens", 9) == said(
        "run", " The", "--file", file, "--max-new-tokens", 9
    )


def test_a_seed_gives_the_same_text_again(said):
    drawn = ["run", TEXT, "--temperature", "0.9", "--max-new-tokens", 20, "--seed"]

    assert said(*drawn, 3) == said(*drawn, 3) != said(*drawn, 4)


def test_a_prompt_that_begins_like_an_earlier_one_is_not_read_again(said, tmp_path):
    root = tmp_path / "prefixes"
    cold = said("run", TEXT + " The end", "--max-new-tokens", 9)
    said("run", TEXT, "--prompt-cache", root, "--max-new-tokens", 0)
    strict = said(
        "run", TEXT + " The end", "--prompt-cache", root, "--strict", "--max-new-tokens", 9
    )

    assert cold == strict
    assert "512 of 709 tokens from the prompt cache" in said.notes


def test_ctrl_c_leaves_what_was_committed_saved_and_usable(said, home, monkeypatch):
    words = loading.nano_words()

    def interrupted(ids):
        for number, token in enumerate(ids):
            yield chr(token)
            if number == 4:
                raise KeyboardInterrupt

    patched = loading.Words(
        begin=words.begin,
        encode=words.encode,
        pieces=interrupted,
        stop_ids=words.stop_ids,
        name=words.name,
    )
    with monkeypatch.context() as patch:
        patch.setattr(loading, "nano_words", lambda: patched)
        first = said("run", TEXT, "--session", "notes", code=INTERRUPTED)
    second = said("run", "--session", "notes", "--max-new-tokens", 20)
    whole = said("run", TEXT, "--max-new-tokens", 25)

    assert 726 == read_session(open_root(home), "notes").state.position
    assert whole.removesuffix("\n") == first.removesuffix("\n") + second.removesuffix("\n")


def test_a_session_in_use_is_refused_with_its_holder(said, home):
    storage = open_root(home, create=True)
    with storage.lock("notes"):
        said("run", TEXT, "--session", "notes", code=REFUSED)

    assert "in use by process" in said.notes
    assert [] == session_names(storage)


def test_max_context_reached_is_a_clear_end_and_the_session_is_intact(said, home):
    said("run", TEXT, "--session", "notes", "--max-context", 710, "--max-new-tokens", 99)

    assert "max_context 710 is reached; session notes is saved" in said.notes
    assert 710 == read_session(open_root(home), "notes").state.position


def test_a_prompt_longer_than_max_context_is_refused(said):
    said("run", TEXT, "--max-context", 700, code=REFUSED)

    assert "max_context 700" in said.notes


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["run"], "a prompt, --file or --session"),
        (["run", "x", "--max-new-tokens", "-1"], "at least 0"),
        (["run", "x", "--dtype", "int8"], "float16"),
        (["run", "x", "--device", "nowhere"], "device"),
        (["run", "x", "--session", "../x"], "name"),
        (["run", "x", "--file", "/nowhere/x.txt"], "readable text"),
        (["run", "x", "--model", "/nowhere/model"], "glimmer-nano"),
        (["run", "--session", ""], "name"),
        (["chat", "glimmer-nano"], "chat template"),
        (["sessions", "show", "nothing"], "no session 'nothing'"),
        (["sessions", "rm", "nothing"], "no session 'nothing'"),
        (["sessions", "fork", "nothing", "copy"], "no session 'nothing'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_what_cannot_be_done_is_refused_in_words(said, arguments, words):
    said(*arguments, code=REFUSED)

    assert words in said.notes


def test_a_model_without_both_kinds_of_layers_is_refused(said, tmp_path):
    config = {
        "model_type": "llama",
        "num_hidden_layers": 2,
        "hidden_size": 8,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "architectures": ["LlamaForCausalLM"],
    }
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    said("run", "x", "--model", tmp_path, code=REFUSED)

    assert "is not a hybrid model: its attention layers are all full_attention" in said.notes


def test_too_little_memory_is_refused_by_the_plan_before_anything_is_loaded():
    with pytest.raises(MemoryUnavailable, match="--max-context"):
        check_memory(loading.config_of("glimmer-nano"), max_context=1 << 40)


def test_sessions_are_listed_shown_forked_and_removed(said, home):
    assert "no sessions yet" in said("sessions", "ls")
    said("run", TEXT, "--session", "notes", "--max-new-tokens", 3)
    said("sessions", "fork", "notes", "copy")
    listed = said("sessions", "ls")
    said("run", " And", "--session", "copy", "--max-new-tokens", 3)

    assert "notes" in listed
    assert "copy" in listed
    assert "704 tokens" in said("sessions", "show", "notes")
    assert "711 tokens" in said("sessions", "show", "copy")
    said("sessions", "fork", "notes", "copy", code=REFUSED)
    said("sessions", "rm", "notes")
    assert ["copy"] == session_names(open_root(home))


def test_another_models_session_is_refused_by_the_part_that_differs(said):
    said("run", TEXT, "--session", "notes", "--max-new-tokens", 3)
    said("run", "--session", "notes", "--dtype", "bfloat16", code=REFUSED)

    assert "fingerprint.groups" in said.notes


@pytest.fixture
def chat_model(tmp_path):
    return model_folders.sliding(tmp_path / "model")


@pytest.fixture
def stateful_model(tmp_path):
    return model_folders.stateful(tmp_path / "stateful")


def test_a_session_with_states_beside_its_rows_goes_on_with_a_prompt(said, stateful_model):
    command = ["run", "--model", stateful_model, "--max-new-tokens"]
    whole = said(*command, 20, "some words and more")
    said(*command, 0, "some words", "--session", "s")
    found = said(*command, 20, " and more", "--session", "s")

    assert "11 of 20 tokens from session s" in said.notes
    assert whole == found
    said("run", "--model", stateful_model, "--session", "s", code=REFUSED)
    assert "prompt: expected a token more" in said.notes


def test_a_prompt_cache_holds_states_beside_rows(said, stateful_model, tmp_path):
    command = ["run", "--model", stateful_model, "--prompt-cache", tmp_path / "root"]
    said(*command, "--max-new-tokens", 0, "some words")
    said(*command, "--max-new-tokens", 5, "some words and more")

    assert "11 of 20 tokens from the prompt cache" in said.notes


def test_a_chat_goes_on_from_turn_to_turn_without_reading_it_again(said, chat_model, monkeypatch):
    lines = iter(["hello there", "and then?", ""])
    monkeypatch.setattr("builtins.input", lambda _prompt: next(lines))
    text = said("chat", chat_model, "--temperature", 0, "--max-new-tokens", 40)

    assert 2 == len(text.strip("\n").splitlines())


def test_any_hybrid_model_runs_from_its_folder(said, chat_model):
    text = said("run", "some words", "--model", chat_model, "--max-new-tokens", 50)
    said("run", "some words", "--model", chat_model, "--session", "s", "--max-new-tokens", 25)
    said("run", "--model", chat_model, "--session", "s", "--max-new-tokens", 25)

    assert text.strip()
    assert "of 36 tokens from session s" in said.notes


def test_the_demo_shows_every_comparison_come_out_as_it_should():
    done = subprocess.run(
        [sys.executable, "-m", "kvplane.cli", "demo", "--json"],
        check=True,
        capture_output=True,
        text=True,
    )
    facts = json.loads(done.stdout)

    assert facts["good"]
    assert [True, True, True, True, False] == [c["wanted"] for c in facts["comparisons"]]
    assert [64, 64, 64, 64] == [c["equal"] for c in facts["comparisons"][:4]]
    assert 0 < facts["comparisons"][4]["steps"] - facts["comparisons"][4]["equal"]
    assert (facts["planned"], 1024) == (facts["rows"], facts["warm"]["reused"])


def test_a_model_that_also_takes_pictures_runs_as_text(said, tmp_path):
    folder = model_folders.saved(zoo.build("muse_glimmer"), tmp_path / "muse")

    assert said("run", "some words", "--model", folder, "--max-new-tokens", 9).strip()
