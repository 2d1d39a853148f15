"""What the page shows of a Run, one module per section: files of the Run in, plain JSON values out. No torch."""
