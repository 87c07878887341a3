"""Functions and models of which some parts are captured and others run eagerly."""
