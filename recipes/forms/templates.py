"""What messages look like. `{slot}` is filled in; `[...]` is left out of some: its field is null then.

The templates of `HELD_OUT` are never trained on.
"""

from __future__ import annotations

TRAINED: dict[str, tuple[str, ...]] = {
    "appointment": (
        "{Title}[ with {people}] {date}[ {time}][ {place}][, {minutes}].",
        "Please book {title}[ with {people}] {date}[ {time}][ {place}][ {minutes}].",
        "Can we do {title} {date}[ {time}][ {place}]?[ {People} will join.][ It takes {bare_minutes}.]",
        "Reminder: {title}[ {place}] {date}[ {time}][, {minutes}][, with {people}].",
        "{Date} {time} I have {title}[ with {people}][ {place}].",
        "Put {title} into my calendar {date}[ {time}].[ We meet {place}.]",
        "Hi {other}, let us meet for {title} {date}[ {time}][ {place}].[ {People} will be there too.]",
        "new entry - {title} - {date}[ - {time}][ - {minutes}][ - {place}]",
        "Are you free {date}[ {time}] for {title}[ with {people}]?[ {bare_minutes} should be enough.]",
        "{title}, {date}[, {time}][, {place}][, {people}]",
        "The {title} was moved to {bare_date}[ {time}].[ It is now {place}.]",
        "Don't forget {title} {date}[ {time}]![ {People} asked for {bare_minutes}.]",
    ),
    "order": (
        "Please send {items}[ by {due}].[ {Customer}]",
        "I would like to order {items}.[ Please deliver by {due}.][ Thanks, {customer}]",
        "{customer} orders {items}[, needed by {due}].",
        "Order from {customer}: {items}[; delivery until {due}].",
        "We need {items}[ before {due}].[ Regards, {customer}]",
        "Hello, can you ship {items} to {customer}[ by {due}]?",
        "items: {items}[\ncustomer: {customer}][\nby: {due}]",
        "My name is {customer} and I want {items}.[ {Due} would be fine.]",
        "Add {items} to the order[ of {customer}][, due {due}].",
        "To be delivered by {due}: {items}.[ For {customer}.]",
    ),
    "contact": (
        "{name}[, {company}][, {email}][, {phone}][, {city}]",
        "My name is {name}[ and I work for {company}][ in {city}].[ Mail: {email}.][ Phone: {phone}]",
        "Please add {name}[ from {company}][ in {city}][, {email}][, phone {phone}].",
        "{name}\n[{company}\n][{city}\n][{phone}\n][{email}]",
        "The new contact[ at {company}] is {name}[, {phone}][ or {email}].[ The office is in {city}.]",
        "Best regards\n{name}[\n{company}][\nTel. {phone}][\n{email}][\n{city}]",
        "Write to {email}: that is {name}[ of {company}][, {city}].",
        "name: {name}[; company: {company}][; mail: {email}][; tel: {phone}][; city: {city}]",
        "Call {name}[ ({company})] on {phone}[ or write to {email}].",
        "I met {name}[ of {company}] in {city}.[ Mail: {email}][, mobile {phone}]",
    ),
    "measurement": (
        "{Quantity}[ at {sensor}] was {reading}[ {date}][ {time}].",
        "[{Sensor}: ]{quantity} {reading}[, {bare_date}][, {bare_time}]",
        "We measured a {quantity} of {reading}[ at {sensor}][ {date}][ {time}].",
        "[{time_first} ]{quantity} = {reading}[ ({sensor})]",
        "[{Date} ]{sensor} reported {reading} {quantity}[ {time}].",
        "The {quantity}[ of {sensor}] is now {reading}.",
        "Reading[ of {sensor}][ taken {date}][ {time}]: {quantity} {reading}",
        "{reading} - {quantity}[ - {sensor}][ - {bare_date}][ - {bare_time}]",
        "[{Sensor} ]shows {reading} of {quantity}[ {time}].",
    ),
    "log": (
        "[{iso_date} ][{clock} ]{LEVEL} \\[{service}\\][ code={code}] {fault}",
        "{service}: {LEVEL}: {fault}[ ({code})][ at {clock}]",
        "{LEVEL} {service}[ {code}]: {fault}[ {iso_date}][ {clock}]",
        "level={level} service={service}[ code={code}] msg=\"{fault}\"[ time={clock}]",
        "[{iso_date}T][{clock}Z ]{service} {level} - {fault}[, code {code}]",
        "\\[{LEVEL}\\] {service} - {fault}[ - status {code}][ - {clock}]",
        "{service}\\[{pid}\\]: <{level}> {fault}[ rc={code}][ {iso_date} {clock}]",
        "[{clock} | ]{LEVEL} | {service} | {fault}[ | {code}]",
    ),
    "address": (
        "{name}, {number} {street}, {city}[ {postcode}][, {country}]",
        "{number} {street}\n{city}[ {postcode}][\n{country}]",
        "Please send it to {name}, {street} {number}, [{postcode} ]{city}[, {country}].",
        "We moved to {number} {street} in {city}[, {country}].[ The postcode is {postcode}.]",
        "{name} lives at {number} {street}, {city}[, {postcode}].",
        "[{name}\n]{street} {number}\n[{postcode} ]{city}[\n{country}]",
        "street: {street} {number}; city: {city}[; zip: {postcode}][; country: {country}][; name: {name}]",
        "My new address is {street} {number}, [{postcode} ]{city}[ in {country}].",
        "deliver to {number} {street}, {city}[, {postcode}][, attention {name}]",
    ),
}  # fmt: skip

HELD_OUT: dict[str, tuple[str, ...]] = {
    "appointment": (
        "{Date}: {title}[ {time}][ {place}].[ Duration {bare_minutes}.][ Guests: {people}]",
        "Could you reserve {bare_minutes} for {title}[ with {people}] {date}[ {time}]?",
        "I'll be at {title} {date}[ {time}][, {place}].",
    ),
    "order": (
        "Hi, this is {customer}. I'd need {items}[, latest {due}].",
        "Purchase: {items}[ / {customer}][ / {due}]",
    ),
    "contact": (
        "You should talk to {name}[, who is at {company}][ in {city}].[ The number is {phone}.][ {email}]",
        "contact person {name} / {email}[ / {phone}][ / {company}][ / {city}]",
    ),
    "measurement": (
        "[{Sensor} gave ]{reading} for {quantity}[ {date}][ {time}].",
        "At {bare_time} the {quantity} was {reading}[ near {sensor}].",
    ),
    "log": (
        "{LEVEL} in {service}[ at {clock}]: {fault}[, exit {code}]",
        "[{iso_date} {clock} - ]{service} - {LEVEL} - {fault}[ - {code}]",
    ),
    "address": (
        "Ship to: {name} | {street} {number} | [{postcode} ]{city}[ | {country}]",
        "[{name}'s ]office is on {street}, house number {number}, in {city}[ {postcode}].",
    ),
}  # fmt: skip

BEFORE = (
    "Hi,", "Hello team,", "Good morning,", "Quick note:", "Sorry for the late reply.",
    "Thanks for your mail of last week.", "As we said on the phone:", "FYI:", "One more thing.",
    "I hope you are well.", "Ticket {small}:", "{other} told me to write to you.",
    "It is raining again here.",
)  # fmt: skip
AFTER = (
    "Thanks!", "Many thanks in advance.", "Let me know if that works.", "See you soon.",
    "Sent from my phone", "P.S. The printer on floor {small} is still broken.", "Greetings from {other}.",
    "No hurry.", "Call extension {small} if anything changes.", "Have a nice day!", "(copied from chat)",
)  # fmt: skip
