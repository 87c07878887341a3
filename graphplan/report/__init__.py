"""Reading statistics and programs aloud: as text for people, as JSON, as a drawing for graphviz."""
