"""One step of one rank of any world, on fake tensors."""

from argparse import ArgumentParser, Namespace

from step08_5d.planning.command_line import Command, add_global_batch, add_model, count, words_of


def add_flags(parser: ArgumentParser) -> None:
    add_model(parser)
    add_global_batch(parser)
    parser.add_argument("--world", type=count, required=True, help="how many ranks there would be")
    parser.add_argument("--rank", type=int, default=0, help="which of them to play")


def show(options: Namespace) -> None:
    """One step of one rank of any world, on fake tensors: what it holds and sends."""
    from step08_5d.planning.dry_run import play  # here, as it imports all that trains

    found = play.dry_run(play.configuration(words_of(options), options.world), options.rank, progress=True)
    play.show(found, options.rank)


COMMAND = Command(add_flags, show, takes_more=True)
