"""Compares the time of a product with the limits of a device: the roofline model.

Values and arithmetic only: nothing here measures, prints or needs MLX. `roofline` has
the roofs and points that a picture needs, `traffic` the bytes of a product, `profile`
puts them together for a plan or for stock MLX, `document` is the JSON form.
"""
