"""How far a command has come, at a terminal and nowhere else."""

from __future__ import annotations

import io

from hardpoint_engine.cli.progress import Progress


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_it_is_drawn_at_a_terminal_only():
    for out, shown in ((Screen(), True), (io.StringIO(), False)):
        progress = Progress(2, 0, out)
        progress.add(5)
        progress.add(5)
        progress.close()
        assert bool(out.getvalue()) == shown
        if shown:
            assert "2/2 100%" in out.getvalue()
            assert out.getvalue().endswith("\n")


def test_a_line_fits_and_counts_what_was_there_before():
    progress = Progress(10, 4, io.StringIO())
    progress.add(30)
    progress.add(30)
    for columns in (20, 40, 80, 200):
        assert len(progress.line(4.0, columns)) < columns
    line = progress.line(4.0, 80)
    assert line.endswith("6/10  60% 15 tokens/s, 0:00:08 left")
    assert line.count("#") == int(0.6 * (line.count("#") + line.count(".")))
    assert "--:--:--" in Progress(10, 0, io.StringIO()).line(0.0, 80)
    assert "100%" in Progress(0, 0, io.StringIO()).line(0.0, 80)
