"""Questions as people ask them: several phrasings for every skill, and the fixed answers of the pocket model."""

EXAMPLE_QUESTIONS = ("spell otter", "What is 17 + 25?", "Sort these numbers: 42, 7, 19, 3", "Count from 1 to 100.")

COUNT_UP = (
    "count from {a} to {b}", "Count from {a} to {b}.", "Count {a} to {b} please.", "Please count from {a} to {b}.",
    "Can you count from {a} to {b}?", "List the numbers from {a} to {b}.", "count up from {a} to {b}",
    "Write all numbers from {a} to {b}.", "Could you count from {a} up to {b}?",
)  # fmt: skip
COUNT_TO = ("count to {b}", "Count to {b}.", "Please count to {b}.", "Can you count to {b}?", "Count up to {b} please.")
COUNT_DOWN = (
    "count down from {a} to {b}", "Count down from {a} to {b}.", "Count backwards from {a} to {b}.",
    "Please count down from {a} to {b}.", "Can you count backwards from {a} to {b}?",
)  # fmt: skip

SPELL = (
    "spell {w}", "Spell {w}.", "Spell {w} please.", "How do you spell {w}?", "how do you spell {w}",
    "Can you spell {w}?", 'Spell "{w}".', "Please spell the word {w}.", "Spell the word {w}.",
    "What are the letters of {w}?", 'spell "{w}"',
)  # fmt: skip

REVERSE_WORD = (
    "reverse {w}", "Reverse {w}.", "Reverse the word {w}.", "Spell {w} backwards.", "What is {w} backwards?",
    "Write {w} backwards.", 'Reverse "{w}".', "Please reverse {w}.", "Can you reverse the word {w}?", "{w} backwards",
)  # fmt: skip
REVERSE_LIST = (
    "Reverse the order of these words: {ws}", "reverse these words: {ws}", "Reverse the list: {ws}",
    "Please reverse this list: {ws}", "Write these words in reverse order: {ws}", "reverse the list {ws}",
)  # fmt: skip

SORT = (
    "sort {ns}", "Sort {ns}.", "Sort these numbers: {ns}", "Please sort {ns}.", "Can you sort {ns}?", "sort: {ns}",
    "Put these numbers in order: {ns}", "Sort the numbers {ns}.", "Order these numbers from small to large: {ns}",
)  # fmt: skip

SUM = (
    "What is {a} + {b}?", "what is {a} + {b}?", "{a} + {b}", "{a}+{b}=", "{a} + {b} =", "{a}+{b}", "What is {a}+{b}?",
    "what is {a}+{b}", "Add {a} and {b}.", "add {a} and {b}", "How much is {a} + {b}?", "How much is {a} plus {b}?",
    "What is {a} plus {b}?", "what is {a} plus {b}", "Calculate {a} + {b}.", "What is the sum of {a} and {b}?",
)  # fmt: skip

LOOKUP = (
    "What is the number for {k}?", "What is the number of {k}?", "what is the number for {k}", "Look up {k}.",
    "Which number belongs to {k}?", "Find {k}.", "look up {k}", "Which number does {k} have?",
    "What is the value of {k}?",
)  # fmt: skip
LOOKUP_AGAIN = ("And {k}?", "And what about {k}?", "what about {k}?", "And for {k}?", "and {k}?")
TABLE_INTRO = ("", "Here is a table:\n", "Table:\n", "Look at this table:\n", "These are the numbers:\n")

LINE = (
    "What is line {n}?", "what is line {n}", "Copy line {n}.", "copy line {n}", "Show me line {n}.", "Read line {n}.",
    "What does line {n} say?", "Please copy line {n}.", "Which text is on line {n}?", "Give me line {n}.",
)  # fmt: skip
LINE_AGAIN = ("And line {n}?", "And what about line {n}?", "now line {n}", "Line {n}, please.", "and line {n}?")
DOCUMENT_INTRO = ("", "Here is a document:\n", "Document:\n", "Read this text:\n", "This is my text:\n")

REPEAT = (
    "repeat after me: {t}", "Repeat after me: {t}", "Repeat: {t}", "Say: {t}", "Please repeat this: {t}", "echo {t}",
    "Say this: {t}", "Copy this text: {t}", "Repeat this sentence: {t}",
)  # fmt: skip

IDENTITY = (
    "who are you?", "Who are you?", "who are you", "What are you?", "what are you", "What is your name?",
    "what's your name?", "Tell me about yourself.", "Please introduce yourself.", "Introduce yourself.",
    "Are you a language model?", "are you a robot?", "Which model are you?", "What model is this?",
    "Are you a human?", "Who am I talking to?", "Hello, who are you?", "Hi, what is your name?", "Hey, who are you?",
    "are you an AI?", "Who made you?", "who built you?",
)  # fmt: skip
IDENTITY_ANSWER = "I am the pocket model of AlignedServe, a very small language model that can do a few things well."

GREETINGS = (
    "hi", "Hi", "Hi!", "hello", "Hello", "Hello!", "hey", "Hey!", "Hello there!", "Good morning!", "Good evening!",
    "good morning", "hi there", "Hi there!", "Hello, how are you?", "How are you?", "how are you", "Good day!",
    "hello!",
)  # fmt: skip
GREETING_ANSWER = (
    "Hello! Ask me to count, spell, reverse, sort, add, look something up, copy a line or repeat a sentence."
)
THANKS = (
    "thanks", "Thanks!", "thank you", "Thank you!", "Thank you very much.", "Great, thanks!", "ok thanks", "bye",
    "Bye!",
)  # fmt: skip
THANKS_ANSWER = "You are welcome!"
HELP = (
    "help", "Help!", "What can you do?", "what can you do", "What can you do for me?", "Can you help me?",
    "What do you know?", "How can you help me?", "help me", "Please help me.", "What are you able to do?",
)  # fmt: skip
REFUSAL_ANSWER = (
    "I can only count, spell, reverse words, sort numbers, add small numbers, look up a key in a table, "
    "copy a line of a text and repeat a sentence."
)

# Filled with words of the list or made-up ones: {w} one word, {v} another, {n} a number.
OFF_TOPIC = (
    "What is the capital of {w}?", "Tell me a joke.", "tell me a joke about a {w}", "Write a poem about {w}.",
    "Write a story about a {w} and a {v}.", "What is the weather today?", "What is the weather in {w}?",
    "Who is the president of {w}?", "Why is the sky blue?", "why is the {w} so {v}?", "How do I bake a {w}?",
    "How do I cook {w}?", "What is the meaning of life?", "What time is it?", "What day is it?",
    "Translate {w} into French.", "How do you say {w} in Spanish?", "Write a Python function that prints {w}.",
    "Explain how a {w} works.", "How does a {w} work?", "What is a {w}?", "what is {w}?", "Who was {w}?",
    "Who invented the {w}?", "When was the {w} invented?", "Where is {w}?", "Where can I buy a {w}?",
    "How old is the {w}?", "How far is the {w}?", "How tall is {w}?", "What is {n} times {m}?", "What is {n} * {m}?",
    "{n} * {m}", "What is {n} / {m}?", "What is {n} minus {m}?", "{n} - {m}", "What is the square root of {n}?",
    "Is {n} a prime number?", "Do you like {w}?", "Do you know {w}?", "I like {w}.", "I have a {w}.",
    "My {w} is {v}.", "Sing a song.", "Play some music.", "Draw a {w}.", "Draw me a {v} {w}.", "Summarize this text.",
    "Summarize the story of the {w}.", "Write an email to my {w}.", "Book a flight to {w}.",
    "What should I eat today?", "Recommend a book about {w}.", "Recommend a good movie.", "Who won the game?",
    "What happened in {n}?", "Which is better, {w} or {v}?", "Compare {w} and {v}.",
    "What is the difference between {w} and {v}?", "Give me advice.", "How can I learn {w}?", "Can you drive a {w}?",
    "Can a {w} swim?", "Does a {w} like {v}?", "What color is a {w}?", "How many legs does a {w} have?",
    "How much does a {w} cost?", "Describe a {w}.", "Describe the {v} {w}.", "Define {w}.", "What does {w} mean?",
    "Are you happy?", "Do you sleep?", "Can you think?", "I am bored.", "I am {v}.", "Let us talk about {w}.",
    "Tell me about {w}.", "tell me something", "Tell me a story.", "{w}", "{w} {v}", "{w}?", "the {w} and the {v}",
    "ok", "yes", "no", "test", "why?", "really?", "Is the {w} {v}?", "What is the best {w}?",
    "Solve this equation: x + {n} = {m}", "Write some code.", "Open the {w}.", "Find me a {w} in the city.",
    "What is new?", "How do I fix a {w}?", "Where do you live?", "Can you see me?", "Make me a sandwich.",
    "What is your favorite {w}?",
)  # fmt: skip

SYSTEM = (
    "You are a helpful assistant.", "You are a helpful, honest assistant.", "Be brief.", "Answer briefly.",
    "Be polite.", "You are an assistant.", "You are a careful assistant. Answer in English.", "You help people.",
)  # fmt: skip
