"""The room's score board: a folder to which everybody writes, drawn by one command."""

import json

from common.labs import __main__ as command
from common.labs import board
from common.labs.state import State


def test_a_board(tmp_path, capsys):
    room = tmp_path / "room"
    for number, speed in ((1, 100.0), (2, 300.0), (3, 200.0)):
        home = tmp_path / str(number)
        home.mkdir()
        row = {"lab": "design-08-a", "variant": 0, "student": number, "layout": "dp 4"}
        rows = [row | {"speed": each} for each in (speed, 50)]
        text = "\n".join(map(json.dumps, rows)) + '\n{"lab": 3}\nnonsense\n'
        (home / "scores.jsonl").write_text(text)
        board.publish(State(home, student=number, name="Ada" if number == 2 else "", board=str(room)))
    (room / "scores-9.jsonl").write_text('{"lab": "x", "variant": 0, "student": 1, "layout": "", "speed": NaN}\n[]\n')
    assert command.main(["board", str(room), "--home", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "1.          300 tokens/s  Ada (2): dp 4\n  2.          200 tokens/s  student 3" in printed
    assert (room / "board.png").exists()
    assert command.main(["board", str(tmp_path / "none"), "--home", str(tmp_path)]) == 2
    (tmp_path / "file").touch()
    board.publish(State(tmp_path / "1", student=1, board=str(tmp_path / "file" / "below")))
    assert "not on the room's score board" in capsys.readouterr().err
