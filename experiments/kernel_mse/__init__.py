"""Mean squared errors of kernel estimates: Fig. 6, the gap of Eq. 26, and a blog's two figures."""
