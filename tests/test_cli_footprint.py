import json
import os
import subprocess
import sys

import huggingface_hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError
from rich.console import Console

import kvplane
from kvplane.cli import COMMANDS, INTERRUPTED, REFUSED, main
from kvplane.cli import footprint as command
from kvplane.cli.output import both, console, human, print_table
from plain_config import PLAIN

COMMAND = [sys.executable, "-c", "import sys; from kvplane.cli import main; sys.exit(main())"]


def run(*arguments, **options):
    return subprocess.run(
        [*COMMAND, *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        **options,
    )


def lines_of(capsys, *arguments):
    assert 0 == main(["footprint", *arguments])
    return capsys.readouterr().out.splitlines()


def facts_of(capsys, *arguments):
    return json.loads("\n".join(lines_of(capsys, *arguments, "--json")))


def refusal(capsys, *arguments):
    assert REFUSED == main(["footprint", *arguments])
    printed = capsys.readouterr()

    assert "" == printed.out
    assert "Traceback" not in printed.err
    return printed.err.strip()


def as_file(folder, **facts):
    path = folder / "config.json"
    path.write_text(json.dumps(PLAIN | facts))
    return path


# the whole command


def test_the_command_prints_its_version():
    done = run("--version")

    assert (0, kvplane.__version__) == (done.returncode, done.stdout.strip())


@pytest.mark.parametrize(
    "arguments", [["--help"], ["footprint", "--help"], ["footprint", "muse-glimmer-30b"]]
)
def test_help_and_plans_of_presets_import_neither_torch_nor_transformers(arguments):
    script = (
        "import sys; from kvplane.cli import main; code = main(sys.argv[1:]); "
        "heavy = {'torch', 'transformers', 'matplotlib'} & set(sys.modules); "
        "print(sorted(heavy), file=sys.stderr); sys.exit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )

    assert (0, "[]") == (done.returncode, done.stderr.strip())


def test_every_command_says_in_help_what_its_function_says():
    done = run("--help")

    for name, _, text in COMMANDS:
        assert name in done.stdout
        assert text.split(".")[0].split(";")[0] in " ".join(done.stdout.split())


def test_a_wrong_option_is_refused_without_a_traceback():
    done = run("footprint", "muse-glimmer-30b", "--contxt", "5")

    assert (REFUSED, "") == (done.returncode, done.stdout)
    assert "--contxt" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_refusal_is_one_line_on_stderr_and_exit_code_2():
    done = run("footprint", "muse-glimer-30b")

    assert (2, "") == (done.returncode, done.stdout)
    assert (
        "kvplane: preset = 'muse-glimer-30b': no preset of that name; nearest: muse-glimmer-30b\n"
        == done.stderr
    )


def test_an_interrupt_is_exit_code_130(monkeypatch):
    def interrupted(_):
        raise KeyboardInterrupt

    monkeypatch.setattr("kvplane.cli.make_app", lambda _: interrupted)

    assert 130 == INTERRUPTED == main([])


def test_a_reader_that_goes_away_is_no_error():
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "wb") as gone:
        done = subprocess.run(
            [*COMMAND, "footprint", "muse-glimmer-30b"],
            stdout=gone,
            stderr=subprocess.PIPE,
            check=False,
            timeout=120,
        )

    assert (0, b"") == (done.returncode, done.stderr)


# tables


def test_the_chapters_table_is_printed(capsys):
    lines = lines_of(capsys, "muse-glimmer-30b", "--context", "131072", "--sessions", "4")
    start = lines.index(next(line for line in lines if line.startswith("kvplane")))

    assert "context" == lines[start + 1].split()[0]
    for line, size, share in zip(
        lines[start + 2 : start + 8],
        [
            ("2,048", "109,051,904", "436,207,616"),
            ("8,192", "190,840,832", "763,363,328"),
            ("16,384", "299,892,736", "1,199,570,944"),
            ("32,768", "517,996,544", "2,071,986,176"),
            ("65,536", "954,204,160", "3,816,816,640"),
            ("131,072", "1,826,619,392", "7,306,477,568"),
        ],
        ["25.0", "57.1", "72.7", "84.2", "91.4", "95.5"],
        strict=True,
    ):
        words = line.split()

        assert size == (words[0], words[7], words[10])
        assert ("81,788,928", "78.0", "MiB") == tuple(words[1:4])
        assert [share, "%"] == words[-2:]


def test_piped_output_has_neither_colours_nor_frames_nor_wraps():
    done = run("footprint", "muse-glimmer-30b", env=os.environ | {"COLUMNS": "20"})

    assert "\x1b" not in done.stdout
    assert done.stdout.isascii()
    words = " ".join(done.stdout.split())

    assert "131,072 81,788,928 78.0 MiB 1,744,830,464 1.62 GiB" in words
    assert max(map(len, done.stdout.splitlines())) > 100


def test_the_model_is_said_first(capsys):
    lines = lines_of(capsys, "gpt-oss-20b", "--context", "10")

    assert [
        "gpt-oss-20b: 24 layers, bfloat16 rows",
        "  12 x sliding_attention, window 128, 8 KV heads x 64: 24,576 B a token",
        "  12 x full_attention, 8 KV heads x 64: 24,576 B a token",
    ] == lines[:3]


def test_one_session_needs_no_column_for_several(capsys):
    header = next(line for line in lines_of(capsys, "gpt-oss-20b") if "one session" in line)

    assert "sessions" not in header


def test_the_stock_caches_are_beside(capsys):
    lines = lines_of(capsys, "muse-glimmer-30b", "--context", "131072")
    start = lines.index(next(line for line in lines if line.startswith("transformers' own")))
    words = lines[start + 7].split()

    assert ("131,072", "1,826,619,392", "6,979,321,856") == (words[0], words[1], words[4])


def test_scratch_payloads_and_forks_are_printed_for_the_context_asked_for(capsys):
    arguments = ("--context", "130815", "--step", "16", "--speculative", "--forks", "3")
    lines = lines_of(capsys, "muse-glimmer-30b", *arguments)
    found = {line[:40].split("  ")[0].strip(): line for line in lines}

    assert "599,040" in found["journal of a step"]
    assert "1,823,184,896" in found["handoff of such a prompt"]
    assert "1,823,198,208" in found["reserved"]
    assert "1,823,198,208" in found["rows held"]
    assert "1,823,198,208" in found["session and 3 forks, mapped memory"]
    assert f"{1_823_198_208 + 3 * 53_248:,}" in found["session and 3 forks, a token later"]
    assert f"{4 * 1_823_198_208:,}" in found["session and 3 forks, heap memory"]


def test_a_prompt_of_one_token_has_nothing_to_hand_off(capsys):
    assert not any("handoff" in line for line in lines_of(capsys, "gpt-oss-20b", "--context", "1"))


def test_a_context_beyond_the_usual_ones_is_the_last_row(capsys):
    contexts = [
        now["context"] for now in facts_of(capsys, "gpt-oss-20b", "--context", "9000")["contexts"]
    ]

    assert [2048, 8192, 9000] == contexts


# json


def test_json_has_the_same_numbers(capsys):
    facts = facts_of(capsys, "muse-glimmer-30b", "--context", "131072", "--sessions", "4")
    last = facts["contexts"][-1]

    assert ("muse-glimmer-30b", "float16", 52) == (facts["model"], facts["dtype"], facts["layers"])
    assert 1_826_619_392 == last["session"]["reserved"]
    assert 7_306_477_568 == last["total"]["reserved"]
    assert 81_788_928 == last["kinds"]["sliding_attention"]["reserved"]
    assert 6_979_321_856 == last["stock"]["dynamic"]["after_prompt"]
    assert 1_826_619_392 == last["stock"]["static"]["held"] == last["saved_session"]


def test_options_reach_the_plan(capsys):
    plain = facts_of(capsys, "gpt-oss-20b", "--context", "4096")["contexts"][-1]
    slack = facts_of(capsys, "gpt-oss-20b", "--context", "4096", "--slack", "16")["contexts"][-1]
    floor = facts_of(capsys, "gpt-oss-20b", "--context", "8", "--row-floor", "32")["contexts"][-1]
    pages = facts_of(capsys, "gpt-oss-20b", "--context", "4097", "--page-nbytes", "4096")
    ring = "s128.8x64x64.bf16"

    assert (128, 144) == (plain["groups"][ring]["capacity"], slack["groups"][ring]["capacity"])
    assert 32 == floor["groups"][ring]["capacity"]
    assert 0 == pages["contexts"][-1]["session"]["pages_held"] % 4096


def test_another_dtype_may_be_asked_for(capsys):
    assert "float32" == facts_of(capsys, "gpt-oss-20b", "--dtype", "float32")["dtype"]
    assert "dtype = 'int8'" in refusal(capsys, "gpt-oss-20b", "--dtype", "int8")


# models


def test_a_path_is_read_as_a_configuration(capsys, tmp_path):
    path = as_file(tmp_path, torch_dtype="float16")
    by_file = facts_of(capsys, str(path))
    by_folder = facts_of(capsys, str(tmp_path))

    assert by_file["contexts"] == by_folder["contexts"]
    assert "float16" == by_file["dtype"]
    assert "bfloat16" == facts_of(capsys, str(path), "--dtype", "bfloat16")["dtype"]


def test_a_configuration_that_is_refused_says_so(capsys, tmp_path):
    path = as_file(tmp_path, layer_types=["full_attention"] * 3 + ["chunked_attention"])

    assert "layer_types[3] = 'chunked_attention': is not supported" in refusal(capsys, str(path))


def test_an_id_is_looked_up_in_the_local_cache(capsys, tmp_path, monkeypatch):
    path = as_file(tmp_path)

    def download(repository, file, *, local_files_only=False):
        assert ("somebody/model-1", "config.json", True) == (repository, file, local_files_only)
        return str(path)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)

    assert 4 == facts_of(capsys, "somebody/model-1")["layers"]


def test_an_id_that_is_not_cached_is_fetched(capsys, tmp_path, monkeypatch):
    path = as_file(tmp_path)

    def download(repository, file, *, local_files_only=False):
        del repository, file
        if local_files_only:
            message = "not here"
            raise LocalEntryNotFoundError(message)
        return str(path)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)

    assert 4 == facts_of(capsys, "somebody/model-1")["layers"]


def test_an_id_that_cannot_be_reached_says_what_was_tried(capsys, monkeypatch):
    def download(*_, **__):
        message = "\nno network\nand more"
        raise LocalEntryNotFoundError(message)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)

    assert (
        "kvplane: model = 'somebody/model-1': is no preset and no path, its config.json is not in "
        "the local Hugging Face cache, and fetching it failed: no network"
        == refusal(capsys, "somebody/model-1")
    )


@pytest.mark.parametrize("name", ["no/such/path/config.json", "nobody", "a b/c"])
def test_a_name_that_is_nothing_lists_presets(capsys, name):
    assert "no preset of that name" in refusal(capsys, name)


@pytest.mark.parametrize(
    ("option", "value"), [("--context", "0"), ("--sessions", "0"), ("--slack", "-1")]
)
def test_a_number_that_means_nothing_is_refused(capsys, option, value):
    assert option.strip("-") in refusal(capsys, "gpt-oss-20b", option, value)


def test_negative_forks_are_refused(capsys):
    assert "forks" in refusal(capsys, "gpt-oss-20b", "--forks", "-1")


# pictures


def test_bytes_over_context_are_drawn(capsys, tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "bytes.png"
    lines_of(capsys, "muse-glimmer-30b", "--plot", str(path))

    assert path.read_bytes().startswith(b"\x89PNG")


def test_a_picture_that_cannot_be_written_is_refused(capsys, tmp_path):
    for name in ("missing/bytes.png", "bytes.nothing"):
        assert "plot: expected a picture file" in refusal(
            capsys, "gpt-oss-20b", "--plot", str(tmp_path / name)
        )


def test_without_matplotlib_the_extra_is_named(capsys, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)

    assert "matplotlib is not installed: pip install 'kvplane[plot]'" in refusal(
        capsys, "gpt-oss-20b", "--plot", str(tmp_path / "bytes.png")
    )


# words


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (81_788_928, "78.0 MiB"),
        (1_826_619_392, "1.70 GiB"),
        (2**40, "1.000 TiB"),
        (5000 * 2**40, "5000.000 TiB"),
    ],
)
def test_bytes_are_said_in_human_units(nbytes, text):
    assert text == human(nbytes)


def test_a_narrow_terminal_gets_the_units_on_a_line_of_their_own():
    narrow = Console(force_terminal=True, width=80)
    wide = Console(force_terminal=True, width=200)

    assert "81,788,928\n78.0 MiB" == both(81_788_928, narrow)
    assert "81,788,928  78.0 MiB" == both(81_788_928, wide)


def test_a_terminal_gets_a_framed_table(monkeypatch, capsys):
    terminal = Console(force_terminal=True, width=100)
    print_table(terminal, "title", ["", "bytes"], [["row", "1"]])

    assert "─" in capsys.readouterr().out
    monkeypatch.setenv("FORCE_COLOR", "1")

    assert console().is_terminal


def test_a_share_of_nothing_is_nothing():
    assert 0.0 == command._share(0, 0)
