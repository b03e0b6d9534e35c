"""The runner of the docs' blocks fails where a reader would."""

from __future__ import annotations

from pathlib import Path

import pytest

from helpers.doc_blocks import Block, blocks, run


def page(folder: Path, text: str) -> Path:
    path = folder / "page.md"
    path.write_text(text)
    return path


def run_page(folder: Path, text: str) -> dict[str, object]:
    names: dict[str, object] = {}
    run(blocks(page(folder, text)), folder, names)
    return names


def test_python_blocks_share_a_namespace_and_see_the_setup(tmp_path):
    names = run_page(
        tmp_path,
        "<!-- setup\na = 1\n-->\n\n```python\nb = a + 1\n```\n\n```python\nc = b + 1\n```\n",
    )
    assert names["c"] == 3


def test_a_broken_python_block_fails_at_its_line(tmp_path):
    with pytest.raises(NameError) as caught:
        run_page(tmp_path, "# Title\n\n```python\nfine = 1\nmissing\n```\n")
    assert caught.traceback[-1].lineno + 1 == 5
    assert str(caught.traceback[-1].path).endswith("page.md")


def test_a_failing_shell_line_fails_though_the_next_succeeds(tmp_path):
    with pytest.raises(AssertionError, match=r"page.md:2 ended with 1"):
        run_page(tmp_path, "```bash\nfalse\ntrue\n```\n")


def test_shell_blocks_call_the_real_command_line(tmp_path):
    run_page(tmp_path, "```bash\nmoetta --version > out.txt\n```\n")
    assert (tmp_path / "out.txt").read_text().startswith("moetta ")
    with pytest.raises(AssertionError, match="no command 'runn'"):
        run_page(tmp_path, "```bash\nmoetta runn\n```\n")


def test_options_reach_moetta_commands_only(tmp_path):
    text = "<!-- options: --limit 64 -->\n```bash\nmoetta --version # says\necho x > y\n```\n"
    (block,) = blocks(page(tmp_path, text))
    assert block.options == "--limit 64"
    with pytest.raises(AssertionError, match=r"(?s)moetta nothing --limit 64  # says.*echo x > y"):
        run(
            [
                Block(
                    block.page,
                    1,
                    "bash",
                    "moetta nothing # says\necho x > y",
                    options=block.options,
                )
            ],
            tmp_path,
            {},
        )


def test_marks_belong_to_one_block(tmp_path):
    first, second, third = blocks(
        page(
            tmp_path,
            "<!-- slow -->\n```bash\na\n```\n"
            "<!-- not run: no network -->\n```bash\nb\n```\n"
            "```bash\nc\n```\n",
        )
    )
    assert first.slow
    assert not first.not_run
    assert second.not_run == "no network"
    assert not third.slow
    assert not third.not_run


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("```\nx\n```\n", "language ''"),
        ("```pyton\nx\n```\n", "language 'pyton'"),
        ("<!-- not run -->\n```bash\nx\n```\n", "say why"),
        ("<!-- slow -->\n\n```bash\nx\n```\n", "not followed by a block"),
        ("<!-- slowly -->\n```bash\nx\n```\n", "not followed by a block"),
        ("<!-- slow -->\n```text\nx\n```\n", "never runs"),
        ("```python\nx\n", "no line '```'"),
    ],
)
def test_what_could_hide_a_block_is_refused(tmp_path, text, message):
    with pytest.raises(ValueError, match=message):
        list(blocks(page(tmp_path, text)))


def test_included_files_are_run(tmp_path):
    (block,) = blocks(page(tmp_path, '```python\n--8<-- "examples/restart.py"\n```\n'))
    assert "moetta.adapt(" in block.code
