"""The room's score board: a folder to which everybody writes, drawn by one command."""

import json

from common.labs import __main__ as command
from common.labs import board
from common.labs.state import State


def test_a_board(tmp_path, capsys):
    room = tmp_path / "room"
    for number, speed in ((1, 100.0), (2, 200.0), (3, 180.0)):
        home = tmp_path / str(number)
        home.mkdir()
        row = {"lab": "design-08-a", "variant": 0, "student": number, "layout": "dp 4"}
        rows = [row | {"speed": each} for each in (speed, 50)]
        text = "\n".join(map(json.dumps, rows)) + '\n{"lab": 3}\nnonsense\n'
        (home / "scores.jsonl").write_text(text)
        board.publish(State(home, student=number, name="Ada" if number == 2 else "", board=str(room)))
    (room / "scores-8.jsonl").write_text(json.dumps(row | {"speed": 1e308}) + "\n")
    odd = '{"lab": "x", "variant": 0, "student": 1, "layout": "", "speed": NaN}\n[]\n'
    (room / "scores-9.jsonl").write_text(odd + odd.replace('"x"', '"design-08-a"') + odd.replace('"x"', '"write-01-a"'))
    (room / "scores-7.jsonl").write_text(json.dumps(row | {"speed": 210.0}) + "\n" + json.dumps(row | {"variant": 4}))
    assert command.main(["board", str(room), "--home", str(tmp_path)]) == 0
    printed, warned = capsys.readouterr()
    assert warned.count("is left out: no layout that we know is as fast on such hardware\n") == 3
    assert "1e+308 tokens/s is left out" in warned and "210.0 tokens/s is left out" in warned
    assert "1.          200 tokens/s  Ada: dp 4\n  2.          180 tokens/s  student 3" in printed
    assert (room / "board.png").exists()
    odd = {"lab": "design-08-a", "variant": 0, "student": 4, "layout": "dp $4 \x1b[2J", "speed": 150.0}
    (room / "scores-4.jsonl").write_text(json.dumps(odd | {"name": "Ada $\\frac$ \x1b[31m"}) + "\n")
    assert command.main(["board", str(room), "--home", str(tmp_path)]) == 0
    assert "Ada $\\frac$ [31m: dp $4 [2J" in (printed := capsys.readouterr().out) and "\x1b" not in printed
    assert command.main(["board", str(tmp_path / "none"), "--home", str(tmp_path)]) == 2
    (tmp_path / "file").touch()
    board.publish(State(tmp_path / "1", student=1, board=str(tmp_path / "file" / "below")))
    assert "not on the room's score board" in capsys.readouterr().err


def test_people_who_work_as_one_number_are_several(tmp_path, capsys):
    """Who works as number 0 with others has a row of their own, and one row if they also have a number."""
    room, row = tmp_path / "room", {"lab": "design-08-a", "variant": 0, "layout": "dp 4"}
    for place, (name, numbers) in enumerate((("Ada", (0, 4)), ("Cy", (0,)), ("Ük/ü", (0,)), ("ük:ü", (0,)))):
        home = tmp_path / str(place)
        home.mkdir()
        for number in numbers:
            with (home / "scores.jsonl").open("a") as file:
                file.write(json.dumps(row | {"student": number, "speed": 100.0 + place}) + "\n")
            board.publish(State(home, student=number, name=name, board=str(room)))
    assert len(list(room.glob("*.jsonl"))) == 5
    assert [board.who(row) for row in board.best_rows(room)["design-08-a", 0]] == ["ük:ü", "Ük/ü", "Cy", "Ada"]
    assert not capsys.readouterr().err
    board.publish(State(tmp_path / "0", student=0, board=str(room)))
    assert "--name gives you a row of your own" in capsys.readouterr().err


def test_a_design_that_cannot_run_leaves_the_board_as_it_is(tmp_path):
    room = tmp_path / "room"
    board.publish(State(tmp_path, student=0, name="Ada", board=str(room)))
    assert not room.exists()
