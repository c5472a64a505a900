"""From image files to a dataset of equal images: sources -> decoding within limits -> the model's own resizing."""
