"""Animations: pictures in memory, one after the other in a GIF."""

from common.drawing.figures import figure_path


def as_image(figure):
    """Return a figure as a picture in memory, a frame of an animation."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from PIL import Image

    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return Image.frombuffer("RGBA", canvas.get_width_height(), canvas.buffer_rgba()).convert("RGB")


def save_animation(images: list, durations: list[int], name: str) -> None:
    """Save pictures of one size as the animation NAME.gif in the folder of this step's figures, and print where.

    Args:
        durations: how long each picture is shown, in ms.
    """
    from PIL import Image

    palette = images[-1].quantize(48, dither=Image.Dither.NONE)
    images = [image.quantize(palette=palette, dither=Image.Dither.NONE) for image in images]
    path = figure_path(name).with_suffix(".gif")
    images[0].save(path, save_all=True, append_images=images[1:], duration=durations, loop=0, optimize=True)
    print(f"  figure: {path}")
