"""Where a transcoder's files lie; known before torch is imported."""

from pathlib import Path

FOLDER = "transcoder"  # of a Run


def find_transcoder(folder: Path) -> Path:
    """The folder of its files: this one, or that of a Run."""
    for place in (folder, folder / FOLDER):
        if (place / "config.yaml").is_file():
            return place
    raise ValueError(
        f"no transcoder in {folder}: expected a config.yaml beside W_enc_*.safetensors or layer_*.safetensors "
        "(make one with `sparselens transcode`)"
    )
